/* The work for every captured device tensor that must not wait for Python: launching a compiled
 * kernel or copying a tensor to our memory, on a stream of the program; and writing index lines for
 * many summaries at once, while the program runs on.
 *
 * The driver's functions are looked up on first use: building this file needs nothing of CUDA, and
 * `driftline_open_driver` reports a missing driver. Addresses are passed as numbers; the caller
 * keeps the memory they point to alive.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <locale.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int driftline_launch_abi(void) { return 2; }

/* --- the driver */

typedef int (*Launching)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         void *, void **, void **);
typedef int (*Asking)(void *, int *);
typedef int (*Current)(void **);
typedef int (*Copying)(uint64_t, uint64_t, size_t, void *);

static Launching launch_kernel;
static Asking is_capturing;
static Current current_context;
static Copying copy_on_device;

/* Look up the driver's functions; returns 0 on success. */
PUBLIC int driftline_open_driver(void)
{
    if (copy_on_device)
        return 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver)
        return 1;
    launch_kernel = (Launching)dlsym(driver, "cuLaunchKernel");
    is_capturing = (Asking)dlsym(driver, "cuStreamIsCapturing");
    current_context = (Current)dlsym(driver, "cuCtxGetCurrent");
    Copying copy = (Copying)dlsym(driver, "cuMemcpyDtoDAsync_v2");
    if (!launch_kernel || !is_capturing || !current_context || !copy)
        return 2;
    copy_on_device = copy;
    return 0;
}

/* The context of the calling thread; 0 if there is none. */
PUBLIC uint64_t driftline_context(void)
{
    void *context = NULL;
    if (!current_context || current_context(&context))
        return 0;
    return (uint64_t)(uintptr_t)context;
}

/* Whether a stream accepts our work: its context is the thread's, and no graph is being recorded.
 * */
static int usable(uint64_t context, uint64_t stream)
{
    void *mine = NULL;
    int recording = 0;
    if (current_context(&mine) || (uint64_t)(uintptr_t)mine != context)
        return 0;
    return !is_capturing((void *)(uintptr_t)stream, &recording) && !recording;
}

/* One kernel for one shape of tensor: everything that is the same for all calls. */
typedef struct {
    uint64_t function, context;
    int64_t programs, threads, shared;
    int64_t numbers[10]; /* its arguments; each call fills in 0, 4 and 6 */
} Launch;

/* Launch the kernel; returns 0 on success, and otherwise nothing was launched. */
PUBLIC int driftline_launch(const Launch *one, uint64_t stream, int64_t address, int64_t row,
                            int64_t slot)
{
    if (!usable(one->context, stream))
        return -1;
    int64_t numbers[10];
    void *nothing = NULL;
    memcpy(numbers, one->numbers, sizeof numbers);
    numbers[0] = address;
    numbers[4] = row;
    numbers[6] = slot;
    void *arguments[16]; /* Triton's own arguments come last: none, one or two null pointers */
    for (int i = 0; i < 10; i++)
        arguments[i] = &numbers[i];
    for (int i = 10; i < 16; i++)
        arguments[i] = &nothing;
    return launch_kernel((void *)(uintptr_t)one->function, (unsigned)one->programs, 1, 1,
                         (unsigned)one->threads, 1, 1, (unsigned)one->shared,
                         (void *)(uintptr_t)stream, arguments, NULL);
}

/* Copy bytes within a device, on a stream; returns 0 if the copy was queued. */
PUBLIC int driftline_copy(uint64_t context, uint64_t stream, uint64_t to, uint64_t from, uint64_t size)
{
    if (!usable(context, stream))
        return -1;
    return copy_on_device(to, from, size, (void *)(uintptr_t)stream);
}

/* --- lines */

/* The constant parts of all lines of one tensor; see `line_ends` in `runs/index_lines.py`. */
typedef struct {
    const char *head, *tail; /* up to the step; from the visit to the digest */
    int64_t head_size, tail_size;
    int64_t count, width, brief; /* brief: only the digest, without a summary */
} Words;

typedef struct {
    int64_t words, step, visit;
    int64_t slot; /* slot of its row of figures; several notes may share one */
} Note;

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static char *put(char *at, const char *text, size_t size)
{
    memcpy(at, text, size);
    return at + size;
}

#define PUT(at, text) put(at, text, sizeof(text) - 1)

static char *put_whole(char *at, int64_t value)
{
    char digits[24];
    int n = 0;
    uint64_t left = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    do {
        digits[n++] = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    if (value < 0)
        *at++ = '-';
    while (n)
        *at++ = digits[--n];
    return at;
}

/* The shortest decimal number that reads back as this value, formatted as Python does; in the C
 * locale. */
static char *put_number(char *at, double value)
{
    if (isnan(value))
        return PUT(at, "\"nan\"");
    if (isinf(value))
        return value > 0 ? PUT(at, "\"inf\"") : PUT(at, "\"-inf\"");
    if (value == floor(value) && fabs(value) < 1e15) {
        if (value == 0 && signbit(value))
            return PUT(at, "-0.0");
        at = put_whole(at, (int64_t)value);
        return PUT(at, ".0");
    }
    char text[40]; /* d.ddde+xx */
    for (int digits = fabs(value) < 2.3e-308 ? 1 : 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*e", digits - 1, value);
        if (strtod(text, NULL) == value)
            break;
    }
    const char *from = text;
    if (*from == '-')
        *at++ = *from++;
    char *mark = strchr(from, 'e');
    int power = (int)strtol(mark + 1, NULL, 10);
    char digits[20];
    int many = 0;
    for (const char *one = from; one < mark; one++)
        if (*one != '.')
            digits[many++] = *one;
    while (many > 1 && digits[many - 1] == '0')
        many--;
    if (power < -4 || power >= 16) {
        *at++ = digits[0];
        if (many > 1) {
            *at++ = '.';
            at = put(at, digits + 1, (size_t)many - 1);
        }
        return at + sprintf(at, "e%c%02d", power < 0 ? '-' : '+', abs(power));
    }
    if (power < 0) {
        at = PUT(at, "0.");
        for (int i = -1; i > power; i--)
            *at++ = '0';
        return put(at, digits, (size_t)many);
    }
    for (int i = 0; i < many || i <= power + 1; i++) {
        if (i == power + 1)
            *at++ = '.';
        *at++ = i < many ? digits[i] : '0';
    }
    return at;
}

static char *put_hex(char *at, uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        *at++ = "0123456789abcdef"[(value >> shift) & 15];
    return at;
}

static char *put_base64(char *at, const uint8_t *data, size_t size)
{
    size_t i = 0;
    for (; i + 2 < size; i += 3) {
        uint32_t three = (uint32_t)data[i] << 16 | (uint32_t)data[i + 1] << 8 | data[i + 2];
        *at++ = letters[three >> 18];
        *at++ = letters[three >> 12 & 63];
        *at++ = letters[three >> 6 & 63];
        *at++ = letters[three & 63];
    }
    if (i < size) {
        uint32_t three = (uint32_t)data[i] << 16 | (i + 1 < size ? (uint32_t)data[i + 1] << 8 : 0);
        *at++ = letters[three >> 18];
        *at++ = letters[three >> 12 & 63];
        *at++ = i + 1 < size ? letters[three >> 6 & 63] : '=';
        *at++ = '=';
    }
    return at;
}

enum { MOST_OF_A_ROW = 1400, FIGURES = 80, SKETCH_AT = 16, SKETCH = 64 };

static char *put_summary(char *at, const double *row, int64_t count)
{
    double finite = row[0], mean = row[1], spread = row[2], low = row[3], high = row[4];
    double std = NAN, l2 = 0.0;
    if (finite > 0) {
        std = sqrt(spread / finite);
        l2 = sqrt(spread + finite * mean * mean);
    } else {
        low = high = mean = NAN;
    }
    at = PUT(at, ",\"summary\":{\"count\":");
    at = put_whole(at, count);
    at = put_whole(PUT(at, ",\"zeros\":"), (int64_t)row[5]);
    at = put_whole(PUT(at, ",\"nan\":"), (int64_t)row[6]);
    at = put_whole(PUT(at, ",\"pos_inf\":"), (int64_t)row[7]);
    at = put_whole(PUT(at, ",\"neg_inf\":"), (int64_t)row[8]);
    at = put_number(PUT(at, ",\"min\":"), low);
    at = put_number(PUT(at, ",\"max\":"), high);
    at = put_number(PUT(at, ",\"mean\":"), mean);
    at = put_number(PUT(at, ",\"std\":"), std);
    at = put_number(PUT(at, ",\"l2\":"), l2);
    at = PUT(at, ",\"sketch\":\"");
    at = put_base64(at, (const uint8_t *)(row + SKETCH_AT), SKETCH * sizeof(double));
    return PUT(at, "\"}");
}

/* Upper limit for the bytes that the lines of some notes take. */
PUBLIC int64_t driftline_lines_room(const Note *notes, int64_t many)
{
    int64_t size = 0;
    for (int64_t i = 0; i < many; i++) {
        const Words *words = (const Words *)(uintptr_t)notes[i].words;
        size += words->head_size + words->tail_size + MOST_OF_A_ROW;
    }
    return size;
}

/* Write one line for each note, from its row of figures; returns the number of bytes. */
PUBLIC int64_t driftline_lines(const Note *notes, const double *rows, int64_t many, int64_t order,
                               char *out)
{
    static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
    locale_t plain = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    locale_t before = plain ? uselocale(plain) : (locale_t)0;
    char *at = out;
    for (int64_t i = 0; i < many; i++) {
        const Words *words = (const Words *)(uintptr_t)notes[i].words;
        const double *row = rows + notes[i].slot * FIGURES;
        uint64_t digest[2];
        memcpy(digest, row + 9, sizeof digest);
        at = put_whole(PUT(at, "{\"order\":"), order + i);
        at = put(at, words->head, (size_t)words->head_size);
        at = put_whole(at, notes[i].step);
        at = put_whole(PUT(at, ",\"visit\":"), notes[i].visit);
        at = put(at, words->tail, (size_t)words->tail_size);
        at = put_hex(PUT(at, ",\"digest\":\"lanes-128:"), digest[0]);
        at = put_hex(at, digest[1] ^ (((uint64_t)(words->count * words->width) + 1) * GOLDEN));
        *at++ = '"';
        if (!words->brief)
            at = put_summary(at, row, words->count);
        at = PUT(at, "}\n");
    }
    if (plain) {
        uselocale(before);
        freelocale(plain);
    }
    return at - out;
}
