/*
 * Two emulated devices: which one is current in a thread, whose memory an address is in, whose a stream is. Work of one
 * device that touches memory of the other ends the process with a message (contract.h): no device has peer access.
 */
#ifndef ONT_EMULATE_DEVICES_H
#define ONT_EMULATE_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ONT_EMULATE_DEVICES = 2 };

/* The device that is current in this thread, as by cudaGetDevice(); and the one before, as by cudaSetDevice(). */
int ont_emulate_device(void);
int ont_emulate_set_device(int id);

/* Memory of a device, filled with NaN. NULL: there is no more. */
void *ont_emulate_take(int device, size_t bytes);
void ont_emulate_give(void *data);
/* -1: no device's, which all may use. */
int ont_emulate_owner(const void *address);

/* Around what a device does for the current one: its launches, its copies, its libraries' functions. */
void ont_emulate_begin_work(const char *what);
void ont_emulate_end_work(void);

/* The stream that is current on a device. */
void *ont_emulate_stream(int device);
/* Ends the process where the stream is another device's than the current one. */
void ont_emulate_check_stream(const char *what, const void *stream);
/* Later work on `stream` waits for the work that is on `other` now; the host waits for the work on `stream`. */
void ont_emulate_join_streams(const void *stream, const void *other);
void ont_emulate_wait_for_stream(const void *stream);

#ifdef __cplusplus
}
#endif

#endif
