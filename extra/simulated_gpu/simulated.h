// What the simulated libraries ask of each other. All of it is in runtime.cpp.
#pragma once
#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

struct Access {
    const void* at;  // as the program knows it
    size_t bytes;
    bool write;
    std::string what = "";  // "float32[4, 8]", or "" where only bytes are known
};

template <class... Values>
static std::string format(const char* pattern, Values... values) {
    char text[1024];
    snprintf(text, sizeof text, pattern, values...);
    return text;
}

// An operation is issued on a stream: look for accesses that nothing orders. Nothing is computed here.
void simulated_operation(cudaStream_t stream, const std::string& name, const std::vector<Access>& accesses);
extern "C" {
// Where the simulation itself can read and write what the program knows as `at`. nullptr, and a text in
// `simulated_error`, if these bytes are not memory of a GPU or pinned memory that is there. `device`: -1 if pinned.
void* simulated_memory(const void* at, size_t bytes, int* device);
const char* simulated_error();
// The allocator has given out these bytes, or has got them `back`, to give them to the next who asks on this stream.
void simulated_given(const void* at, size_t bytes, cudaStream_t stream, int device, bool back);
// Says on stderr, in the file of findings and in `simulated_error` that `name` is not simulated. An error's number.
int simulated_missing(const char* name);
void simulated_forget();  // what was found, and what memory remembers of operations that were
}
