/*
 * See images.h. Asked before a GPU is used: a trial launch on every GPU of the machine would make a context on each,
 * which takes hundreds of megabytes.
 */
#include "images.h"

#include <ctype.h>
#include <stdlib.h>

bool ont_images_run_on(const char *architectures, int capability)
{
    bool runs = false;
    for (const char *at = architectures; *at;) {
        char *end;
        int named = (int)strtol(at, &end, 10);
        if (end == at) {
            at++;
            continue;
        }
        bool alone = isalpha((unsigned char)*end);
        while (isalpha((unsigned char)*end)) end++;
        at = end;
        while (*at == ' ') at++;
        bool same_major = capability / 10 == named / 10;
        runs |= alone ? capability == named : (same_major || !*at) && capability >= named;
    }
    return runs;
}
