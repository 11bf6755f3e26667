/* A program of the library that runs three kernels; the one named on the command line overflows. */
#include <stdio.h>
#include <string.h>

int atb_probe_overflow_check(void);
int atb_probe_overflow_stop(void);
void atb_probe_overflow(const char *name);

int main(int argc, char **argv) {
    static const char *kernels[] = {"RmsNormOperation_0:RmsNormF16", "ElewiseOperation_1:AddF32Tactic",
                                    "LinearOperation_2_0:MatMulF16"};
    for (int i = 0; i < 3; i++) {
        float value = argc > 1 && !strcmp(argv[1], kernels[i]) ? 1e38f * 10 : 1;
        if (!atb_probe_overflow_check() || value < 1e38f) continue;
        atb_probe_overflow(kernels[i]);
        if (atb_probe_overflow_stop()) return 5; /* the runner returns an error */
    }
    puts("all kernels ran");
    return 0;
}
