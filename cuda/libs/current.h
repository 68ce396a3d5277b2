/*
 * The current device of a thread, as PyTorch's guards change it.
 */
#ifndef ONT_CUDA_CURRENT_H
#define ONT_CUDA_CURRENT_H

/* Makes a device current. *previous: the one before, for ont_current_leave(). Returns CUDA's error code. */
int ont_current_enter(int id, int *previous);
void ont_current_leave(int previous);

#endif
