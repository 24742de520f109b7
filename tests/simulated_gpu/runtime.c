/* A simulated GPU: the part of the CUDA runtime that torch calls before it allocates anything.
 *
 * Preloaded, these functions stand in front of those of libcudart. A device can be counted, described and chosen, streams
 * and events exist, and every allocation fails as on a GPU whose memory is full. Whatever is not here falls through to
 * the real libcudart, which asks driver.c and gets an error.
 *
 * SIMULATED_GPU_COUNT    number of devices (1)
 * SIMULATED_GPU_TOO_OLD  set: devices are seen, but the driver is older than this runtime, so none can be used
 * SIMULATED_GPU_LOG      file that notes every use of a device: process, rank (- outside a rank), what, command line
 *
 * CUDA_VISIBLE_DEVICES="" hides the devices, as it does with real ones.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THIS_RUNTIME = CUDART_VERSION, OLD_DRIVER = 11040 };

static __thread int current_device = 0;

static int too_old(void) { return getenv("SIMULATED_GPU_TOO_OLD") != NULL; }

static int num_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *count = getenv("SIMULATED_GPU_COUNT");
  if (visible && !*visible) return 0;
  return count ? atoi(count) : 1;
}

/* The start of this process's command line, on one line. */
static void read_command(char *command, size_t size) {
  FILE *file = fopen("/proc/self/cmdline", "r");
  size_t length = file ? fread(command, 1, size - 1, file) : 0;
  if (file) fclose(file);
  command[length] = 0;
  for (size_t i = 0; i < length; i++)
    if (command[i] < ' ') command[i] = ' ';
}

/* One line per use. */
static void note(const char *what) {
  const char *path = getenv("SIMULATED_GPU_LOG"), *rank = getenv("RANK");
  char command[400];
  FILE *log = path ? fopen(path, "a") : NULL;
  if (!log) return;
  read_command(command, sizeof command);
  fprintf(log, "%d\t%s\t%s\t%s\n", getpid(), rank ? rank : "-", what, command);
  fclose(log);
}

/* What every call says that needs a device. */
static cudaError_t usable(void) {
  if (!num_devices()) return cudaErrorNoDevice;
  return too_old() ? cudaErrorInsufficientDriver : cudaSuccess;
}

static cudaError_t use(const char *what) {
  note(what);
  return usable();
}

/* The real runtime remembers an error from its own start, when it met driver.c; nobody is to hear of that. */
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

/* ---- counting and describing: a process may do this without having a context */

cudaError_t cudaGetDeviceCount(int *count) {
  *count = usable() == cudaSuccess ? num_devices() : 0;
  return usable();
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return usable();
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = too_old() ? OLD_DRIVER : THIS_RUNTIME;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = 0;
  return usable();
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;
  return usable();
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -1;
  return usable();
}

/* Where torch asks for a function of the driver, it gets one that refuses. */
static CUresult refused(void) { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *function = (void *)refused;
  if (found) *found = cudaDriverEntryPointSuccess;
  return usable();
}

/* ---- initializing and choosing: torch does this once in a process that means to use CUDA */

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "Simulated T4");
  properties->major = 7, properties->minor = 5;
  properties->totalGlobalMem = 16ull << 30;
  properties->multiProcessorCount = 40;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsPerMultiProcessor = 1024;
  return use("initialize");
}

cudaError_t cudaSetDevice(int device) {
  cudaError_t found = use("set_device");
  if (found == cudaSuccess && (device < 0 || device >= num_devices())) return cudaErrorInvalidDevice;
  if (found == cudaSuccess) current_device = device;
  return found;
}

/* ---- memory: none is free */

static cudaError_t refuse(void **pointer) {
  cudaError_t found = use("allocate");
  *pointer = NULL;
  return found == cudaSuccess ? cudaErrorMemoryAllocation : found;
}

cudaError_t cudaMalloc(void **pointer, size_t size) { return refuse(pointer); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return refuse(pointer); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes); /* all memory is the host's, and none is pinned */
  attributes->type = cudaMemoryTypeUnregistered;
  return usable();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = 0, *total_bytes = 16ull << 30;
  return use("memory_info");
}

/* ---- streams and events: handles that nobody looks behind; whatever is queued has finished */

static void *new_handle(void) {
  static long last = 0;
  return (void *)(16 * __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = new_handle();
  return use("stream");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = new_handle();
  return use("event");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return use("stream");
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *num_dependencies) {
  *status = cudaStreamCaptureStatusNone;
  return usable();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return usable(); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return usable(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return usable(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return usable(); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return usable(); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return usable(); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return usable(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return usable(); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return usable(); }
