// What the kernels of delta.cu and delta_wide.cu share: their parameters, reads past the L1, loads of rows.
#pragma once
#include "tile.cuh"

static constexpr u32 PARTS = 8, MAX_SLICES = 8;         // chunks of D, as launch.PARTS; slices of N
static constexpr u32 PIECE = 128;                       // columns of D that are summed from zero upwards, as in kernels/shrink.py
static constexpr u32 IDS64 = 1, COPY = 2, OVERLAP = 4;  // as in ops/delta_cuda.py

struct Params {
    const u16 *x, *a, *b, *base;  // base may be null, or out
    u16 *out;
    const void *ids;
    const int *plan;   // may be null
    const int *ranks;  // may be null
    const float *scalings;
    i64 ids_stride;
    i64 x_t, x_g, a_l, a_g, a_r, b_l, b_g, b_n, p_t, p_g, o_t, o_g;  // strides in elements; those of d, r and n are 1
    u32 tokens, slots, features, columns, rank;
    u32 chunk, parts;  // columns of a chunk of D, and how many chunks there are
    u32 merged;        // log2 of the groups whose rows share a tile (they share A)
    u32 spread;        // clusters that share out N, each with an h of its own
    u32 flags;
    u32 slices;                  // 0, or the number of slices of N
    u32 starts[MAX_SLICES + 1];  // where each slice starts
};

// Read past the L1: the kernel before may have written these since they were guessed.
template <class V> __device__ __forceinline__ V fresh(const V *from);
template <> __device__ __forceinline__ i64 fresh(const i64 *from) {
    i64 v;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ int fresh(const int *from) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ float fresh(const float *from) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
    return v;
}
template <> __device__ __forceinline__ u32 fresh(const u32 *from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ u32 slot_of(const Params &p, u32 token) {
    const i64 id = p.flags & IDS64 ? fresh((const i64 *)p.ids + token * p.ids_stride) : fresh((const int *)p.ids + token * p.ids_stride);
    return id >= 0 && id < p.slots ? (u32)id : p.slots;
}

// 8 elements of a row from column `column` on; those past `valid` columns are zeros.
__device__ __forceinline__ void load8(u32 to, const u16 *row, u32 column, u32 valid) {
    const u32 there = valid > column ? min(valid - column, 8u) : 0;
    copy16(to, there ? row + column : row, 2 * there);
}

