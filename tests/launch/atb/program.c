/* A model of two layers on the stand-in library: program ROUNDS DEVICE [EXIT STATUS]. */
#include "atb.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, WIDTH = 4, SIZE = ROWS * WIDTH };
static const long DIMS[] = {ROWS, WIDTH};
static int device, execution;

static void report(const char *ids, const char *name, const char *path, const float *in,
                   const float *out) {
    struct tensor before = {0, 2, 2, DIMS, in, SIZE * sizeof *in};
    struct tensor after = {0, 2, 2, DIMS, out, SIZE * sizeof *out};
    for (int i = 0; i < 2; i++) { /* both folders may hold both sides; the probe chooses */
        const char *moment = i ? "after" : "before";
        atb_probe_tensor(device, execution, ids, name, path, moment, "intensor0.bin", &before);
        atb_probe_tensor(device, execution, ids, name, path, moment, "outtensor0.bin", &after);
    }
}

static void layer(int id, const float *in, float *out) {
    char ids[32], path[128], line[512];
    float normed[SIZE];
    for (int i = 0; i < SIZE; i++) normed[i] = in[i] * 0.5f;
    for (int i = 0; i < SIZE; i++) out[i] = normed[i] + (float)id;
    snprintf(ids, sizeof ids, "%d_0", id);
    snprintf(path, sizeof path, "%d_Decoder_layer/0_RmsNormOperation", id);
    report(ids, "RmsNormOperation", path, in, normed);
    snprintf(ids, sizeof ids, "%d_1", id);
    snprintf(path, sizeof path, "%d_Decoder_layer/1_LinearOperation", id);
    report(ids, "LinearOperation", path, normed, out);
    snprintf(ids, sizeof ids, "%d_1_0", id);
    snprintf(path, sizeof path, "%d_Decoder_layer/1_LinearOperation/0_MatMulKernel", id);
    report(ids, "LinearOperation", path, normed, out);
    atb_probe_tiling(device, execution, path, "tiling", 6);
    snprintf(ids, sizeof ids, "%d", id);
    snprintf(path, sizeof path, "%d_Decoder_layer", id);
    report(ids, "Decoder_layer", path, in, out);
    snprintf(line, sizeof line,
             "1|LinearOperation_%d_11|LinearOperation_%d_1|{}|1|float|nd|3,4|1|float|nd|3,4|"
             "customize| | | | | | | |NO_ERROR",
             id, id);
    atb_probe_row("operation", execution, line);
    atb_probe_row("kernel", execution, line);
    snprintf(line, sizeof line, "[LinearOperation_%d_1]:kernelExecuteTime:%d, totalTime:9", id, id);
    atb_probe_statistic(execution, line);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    device = argc > 2 ? atoi(argv[2]) : 0;
    for (execution = 0; execution < rounds; execution++) {
        float ids[SIZE], hidden[SIZE], middle[SIZE], out[SIZE];
        for (int i = 0; i < SIZE; i++) ids[i] = (float)i, hidden[i] = (float)(i + execution);
        report("0", "WordEmbedding", "0_WordEmbedding", ids, hidden);
        layer(1, hidden, middle);
        layer(2, middle, out);
    }
    char json[1024], name[32];
    for (int id = 1; id <= 2; id++) {
        snprintf(name, sizeof name, "Decoder_layer_%d", id);
        snprintf(json, sizeof json,
                 "{\"opName\":\"%s\",\"opType\":\"Decoder_layer\",\"param\":\"\","
                 "\"inTensors\":[\"%s_input_0\"],\"outTensors\":[\"%s_output_0\"],"
                 "\"internalTensors\":[\"%s_internal_0\"],\"nodes\":["
                 "{\"opName\":\"RmsNormOperation_%d_0\",\"opType\":\"RmsNormOperation\",\"param\":{},"
                 "\"inTensors\":[\"%s_input_0\"],\"outTensors\":[\"%s_internal_0\"]},"
                 "{\"opName\":\"LinearOperation_%d_1\",\"opType\":\"LinearOperation\",\"param\":{},"
                 "\"inTensors\":[\"%s_internal_0\"],\"outTensors\":[\"%s_output_0\"]}]}",
                 name, name, name, name, id, name, name, id, name, name);
        atb_probe_topology("layer", name, json);
    }
    atb_probe_topology("model", "ToyModel",
                       "{\"modelName\":\"ToyModel\",\"inTensors\":[\"ToyModel_input_0\"],"
                       "\"outTensors\":[\"ToyModel_output_0\"],\"nodes\":[]}");
    puts("the toy model has answered");
    return argc > 3 ? atoi(argv[3]) : 0;
}
