/* Stands in for the probe's overflow check: asks, reports, and says when to stop. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A library without a probe looks for nothing. */
#ifndef PROBE
int atb_probe_overflow_check(void) { return 0; }
int atb_probe_overflow_stop(void) { return 0; }
void atb_probe_overflow(const char *name) { (void)name; }
#else
static int is(const char *name, const char *wanted) {
    const char *value = getenv(name);
    return value && strstr(value, wanted) != NULL;
}
int atb_probe_overflow_check(void) { return is("ATB_CHECK_TYPE", "1"); }
int atb_probe_overflow_stop(void) { return is("ATB_EXIT", "1"); }
void atb_probe_overflow(const char *name) {
    char path[4096];
    /* As documented: no slash is in the variable, and each report opens the file anew. */
    snprintf(path, sizeof path, "%s/ait_overflow_res_%d.txt", getenv("ATB_OUTPUT_DIR"),
             (int)getpid());
    FILE *out = fopen(path, "w");
    if (!out) return;
    fprintf(out, "Overflow detected! Operator name: %s", name);
    fclose(out);
}
#endif
