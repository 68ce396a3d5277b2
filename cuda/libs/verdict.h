/*
 * What is known of a plan of cuDNN: whether its results are those of the own kernels.
 */
#ifndef ONT_CUDA_VERDICT_H
#define ONT_CUDA_VERDICT_H

typedef enum ont_verdict { ONT_VERDICT_UNKNOWN, ONT_VERDICT_ACCEPTED, ONT_VERDICT_REFUSED } ont_verdict;

#endif
