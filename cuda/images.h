/*
 * For which GPUs a build has kernels.
 */
#ifndef ONT_CUDA_IMAGES_H
#define ONT_CUDA_IMAGES_H

#include <stdbool.h>

/*
 * Whether a GPU of this compute capability (8.6 is 86) runs a build for `architectures`, as ONNXTRAIN_CUDA_ARCHS lists
 * them ("80 90 100"): each has machine code, which runs on the same major version from its minor version on, and the
 * last one has PTX, which runs on all later ones. Architectures with a letter ("90a") run on that one alone.
 */
bool ont_images_run_on(const char *architectures, int capability);

#endif
