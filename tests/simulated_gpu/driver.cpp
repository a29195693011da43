// libcuda without a GPU: of the driver torch needs these; what else it might call fails by its name (build.py).
extern "C" {
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the simulated driver", 0; }
}
