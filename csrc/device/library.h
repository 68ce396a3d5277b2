/*
 * Shared libraries that are opened at run time: torch's, which is loaded already, and those bundled with the extension.
 */
#ifndef ONT_DEVICE_LIBRARY_H
#define ONT_DEVICE_LIBRARY_H

#include "base/status.h"

void *ont_library_torch(void); /* libtorch_cpu.so as loaded by torch; NULL where torch is not imported */
void *ont_library_dnnl(void);  /* libdnnl.so.3: _libs/ beside the extension, then the loader's path; NULL: none */

#endif
