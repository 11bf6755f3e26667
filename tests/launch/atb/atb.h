/* What the stand-in library reports to its probe; the library's own versions do nothing. */
#ifndef STAND_IN_ATB_H
#define STAND_IN_ATB_H
#include <stddef.h>

struct tensor {
    int dtype, format, rank;
    const long *dims;
    const void *data;
    size_t bytes;
};

/* ids: "1_0"; name: the operation's own; path: "1_Decoder_layer/0_RmsNormOperation";
   moment: "before" or "after"; file: "intensor0.bin". */
void atb_probe_tensor(int device, int execution, const char *ids, const char *name,
                      const char *path, const char *moment, const char *file,
                      const struct tensor *value);
void atb_probe_tiling(int device, int execution, const char *path, const void *data, size_t bytes);
void atb_probe_topology(const char *kind, const char *name, const char *json);
void atb_probe_row(const char *kind, int execution, const char *row);
void atb_probe_statistic(int execution, const char *line);
#endif
