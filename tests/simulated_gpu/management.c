/* A simulated GPU as libnvidia-ml.so.1 sees it: torch counts devices there, so that counting leaves CUDA alone.
 *
 * A driver that is too old for CUDA still counts its devices here: torch.cuda.device_count() is above 0 then, although
 * none can be used. Hiding devices is not this library's business: torch reads CUDA_VISIBLE_DEVICES by itself.
 */
#include <stdlib.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  const char *number = getenv("SIMULATED_GPU_COUNT");
  *count = number ? atoi(number) : 1;
  return SUCCESS;
}

/* What torch asks on the way to the message that memory is full. */
#define REFUSED(name) \
  int name(void) { return NOT_SUPPORTED; }
REFUSED(nvmlDeviceGetHandleByPciBusId_v2)
REFUSED(nvmlDeviceGetNvLinkRemoteDeviceType)
REFUSED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSED(nvmlDeviceGetComputeRunningProcesses)
REFUSED(nvmlSystemGetCudaDriverVersion_v2)
