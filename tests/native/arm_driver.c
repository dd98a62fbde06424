/* Calls kernels on memory that it shares with the test, as a program of another processor: the file that it is given is
   mapped, and each line of its input is a function's name, the number of its arguments, and these. Arguments that begin with
   @ are offsets in the file. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MOST 20
typedef int64_t (*Any)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

int few_rows(int);
void skinny_quantized(void), blocked_quantized(void), dequantize(void), skinny_dense(void), skinny_attention(void);

static const struct {
    const char *name;
    void *function;
} functions[] = {
    {"few_rows", few_rows},         {"skinny_quantized", skinny_quantized}, {"blocked_quantized", blocked_quantized},
    {"dequantize", dequantize},     {"skinny_dense", skinny_dense},         {"skinny_attention", skinny_attention},
};

int main(int count, char **given) {
    struct stat about;
    const int file = count == 2 ? open(given[1], O_RDWR) : -1;
    if (file < 0 || fstat(file, &about)) return 2;
    char *shared = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) return 3;
    char name[64];
    for (int arguments; scanf("%63s %d", name, &arguments) == 2;) {
        int64_t a[MOST] = {0};
        for (int i = 0; i < arguments && i < MOST; i++) {
            char text[64];
            if (scanf("%63s", text) != 1) return 4;
            a[i] = text[0] == '@' ? (int64_t)(shared + strtoll(text + 1, NULL, 10)) : strtoll(text, NULL, 10);
        }
        Any call = NULL;
        for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
            if (!strcmp(functions[i].name, name)) call = (Any)functions[i].function;
        if (!call) return 5;
        const int64_t returned = call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
                                      a[14], a[15], a[16], a[17], a[18], a[19]);
        printf("%" PRId64 "\n", returned);
        fflush(stdout);
    }
    return 0;
}
