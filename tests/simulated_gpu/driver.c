/* A simulated GPU's driver, libcuda.so.1: torch's libraries load with it, and it does nothing.
 *
 * Every function of cuda.h is here, so that loading succeeds; gpu_driver.py writes those that refuse, from the
 * header. The two below are asked whether a context exists, which must not fail.
 */
#include <cuda.h>

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0, *active = 0;
  return CUDA_SUCCESS;
}
