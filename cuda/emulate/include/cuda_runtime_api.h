/*
 * What the sources of cuda/libs use of the CUDA runtime, where kernels are emulated (runtime.c): streams without
 * work, events that are times.
 */
#ifndef ONT_EMULATE_CUDA_RUNTIME_API_H
#define ONT_EMULATE_CUDA_RUNTIME_API_H

typedef enum cudaError { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 } cudaError_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
typedef void *cudaStream_t;
typedef struct ont_emulate_event *cudaEvent_t;

cudaError_t cudaGetDevice(int *id);
cudaError_t cudaSetDevice(int id);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end);

#endif
