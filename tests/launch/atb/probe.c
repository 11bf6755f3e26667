/* Stands in for the probe of the toolkit: obeys the ATB_* variables and writes an ATB dump tree. */
#include "atb.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *order(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

/* Whether `word` is one of the words of a list with one separator. */
static int listed(const char *list, char separator, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; *at;) {
        const char *end = strchr(at, separator);
        size_t here = end ? (size_t)(end - at) : strlen(at);
        if (here == length && !strncmp(at, word, length)) return 1;
        at += here + (end != NULL);
    }
    return 0;
}

static int wanted_id(const char *ids) {
    const char *list = order("ATB_SAVE_TENSOR_IDS");
    int child = !strcmp(order("ATB_SAVE_CHILD"), "1");
    char prefix[256];
    snprintf(prefix, sizeof prefix, "%s", ids);
    for (;;) {
        if (listed(list, ',', prefix)) return 1;
        char *cut = child ? strrchr(prefix, '_') : NULL;
        if (!cut) return 0;
        *cut = 0;
    }
}

static int wanted_name(const char *name) {
    const char *list = order("ATB_SAVE_TENSOR_RUNNER");
    for (const char *at = list; *at;) {
        const char *end = strchr(at, ',');
        size_t here = end ? (size_t)(end - at) : strlen(at);
        if (here && !strncasecmp(at, name, here)) return 1;
        at += here + (end != NULL);
    }
    return 0;
}

static int wanted_operation(const char *ids, const char *name) {
    int by_ids = *order("ATB_SAVE_TENSOR_IDS") != 0, by_name = *order("ATB_SAVE_TENSOR_RUNNER") != 0;
    if (!by_ids && !by_name) return 1;
    return (by_ids && wanted_id(ids)) || (by_name && wanted_name(name));
}

static int wanted_execution(int execution) {
    char text[512], *rest = text, *word;
    snprintf(text, sizeof text, "%s", order("ATB_SAVE_TENSOR_RANGE"));
    while ((word = strsep(&rest, ",")) && rest) {
        long first = atol(word), last = atol(strsep(&rest, ","));
        if (first <= execution && execution <= last) return 1;
        if (!rest) break;
    }
    return 0;
}

static int wanted_moment(const char *moment, const char *file) {
    int before = !strcmp(moment, "before"), input = !strncmp(file, "intensor", 8);
    if (!strcmp(order("ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER"), "1")) return before == input;
    switch (*order("ATB_SAVE_TENSOR_TIME")) {
    case '0': return before;
    case '1': return !before;
    case '2': return 1;
    default: return 0;
    }
}

static int wanted_part(const char *file) {
    char part = *order("ATB_SAVE_TENSOR_PART");
    return part == '2' || part == (strncmp(file, "intensor", 8) ? '1' : '0');
}

static int wanted_device(int device) {
    const char *only = order("ATB_DEVICE_ID");
    return !*only || atoi(only) == device;
}

static int wanted_type(const char *type) { return listed(order("ATB_DUMP_TYPE"), '|', type); }

/* Folders of the dump are made, the output folder itself is not: the real probe gives up without
   it. */
static FILE *create(const char *path, const char *mode) {
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", path);
    size_t output = strlen(order("ATB_OUTPUT_DIR"));
    for (char *at = strchr(folder + output, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(folder, 0750);
        *at = '/';
    }
    return fopen(path, mode);
}

static void root(char *path, size_t room) {
#ifdef OLD_ROOT
    snprintf(path, room, "%sait_dump", order("ATB_OUTPUT_DIR"));
#else
    snprintf(path, room, "%sait_dump_%s", order("ATB_OUTPUT_DIR"), order("ATB_TIMESTAMP"));
#endif
}

void atb_probe_tensor(int device, int execution, const char *ids, const char *name,
                      const char *path, const char *moment, const char *file,
                      const struct tensor *value) {
    if (!wanted_type("tensor") || !wanted_operation(ids, name) || !wanted_execution(execution) ||
        !wanted_moment(moment, file) || !wanted_part(file) || !wanted_device(device))
        return;
    char base[2048], where[4096];
    root(base, sizeof base);
    snprintf(where, sizeof where, "%s/tensors/%d_%d/%d/%s/%s/%s", base, device, (int)getpid(),
             execution, path, moment, file);
    FILE *out = create(where, "wb");
    if (!out) return;
    int values = !strcmp(order("ATB_SAVE_TENSOR"), "1");
    int statistics = !strcmp(order("ATB_SAVE_TENSOR_STATISTICS"), "1");
    size_t bytes = values && !statistics ? value->bytes : 0;
    fprintf(out, "$Version=1.0\n$Object.Count=%d\n$Object.Length=%zu\n", bytes > 0, bytes);
    fprintf(out, "format=%d\ndtype=%d\ndims=", value->format, value->dtype);
    for (int i = 0; i < value->rank; i++) fprintf(out, "%s%ld", i ? "," : "", value->dims[i]);
    fputc('\n', out);
    if (statistics) {
        const float *data = value->data;
        size_t count = value->bytes / sizeof(float);
        double sum = 0, squares = 0, low = data[0], high = data[0];
        for (size_t i = 0; i < count; i++) {
            sum += data[i], squares += (double)data[i] * data[i];
            low = data[i] < low ? data[i] : low, high = data[i] > high ? data[i] : high;
        }
        double guess = squares > 1 ? squares : 1;
        for (int i = 0; i < 60; i++) guess = (guess + squares / guess) / 2; /* no -lm */
        fprintf(out, "max=%f\nmin=%f\nmean=%f\nl2norm=%f\n", high, low, sum / (double)count, guess);
    }
    if (bytes) fprintf(out, "$Object.data=0,%zu\n", bytes);
    fputs("$End=1\n", out);
    fwrite(value->data, 1, bytes, out);
    fclose(out);
}

void atb_probe_tiling(int device, int execution, const char *path, const void *data,
                      size_t bytes) {
    if (strcmp(order("ATB_SAVE_TILING"), "1") || !wanted_execution(execution)) return;
    char base[2048], where[4096];
    root(base, sizeof base);
    snprintf(where, sizeof where, "%s/tiling/%d_%d/%d/%s/kernel_tilingdata.bin", base, device,
             (int)getpid(), execution, path);
    FILE *out = create(where, "wb");
    if (!out) return;
    fwrite(data, 1, bytes, out);
    fclose(out);
}

static void append(const char *folder, const char *file, const char *header, const char *line) {
    char base[2048], where[4096];
    root(base, sizeof base);
    snprintf(where, sizeof where, "%s/%s/%d/%s", base, folder, (int)getpid(), file);
    int fresh = access(where, F_OK) != 0;
    FILE *out = create(where, "ab");
    if (!out) return;
    if (fresh && *header) fprintf(out, "%s\n", header);
    fprintf(out, "%s\n", line);
    fclose(out);
}

void atb_probe_topology(const char *kind, const char *name, const char *json) {
    if (!wanted_type(kind) && !(wanted_type("model") && !strcmp(kind, "layer"))) return;
    char file[256];
    snprintf(file, sizeof file, "%s.json", name);
    append(kind, file, "", json);
}

void atb_probe_row(const char *kind, int execution, const char *row) {
    if (!wanted_type(strcmp(kind, "operation") ? "kernel" : "op") || !wanted_execution(execution))
        return;
    char folder[64], file[64];
    snprintf(folder, sizeof folder, "%s_io_tensors", kind);
    snprintf(file, sizeof file, "%s_tensors_%d.csv", kind, execution);
    append(folder, file,
           "CaseNum|CaseName|OpName|OpParam|InNum|InDType|InFormat|InShape|OutNum|OutDType|"
           "OutFormat|OutShape|DataGenType|DataGenRange|InTensorFile|OutTensorFile|TestType|"
           "TestLevel|FromModel|SocVersion|ExpectedError",
           row);
}

void atb_probe_statistic(int execution, const char *line) {
    if (strcmp(order("ATB_SAVE_CPU_PROFILING"), "1") || !wanted_type("cpu_profiling") ||
        !wanted_execution(execution))
        return;
    char file[64];
    snprintf(file, sizeof file, "operation_statistic_%d.txt", execution);
    append("cpu_profiling", file, "", line);
}
