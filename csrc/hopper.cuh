// What csrc/linear.cu and csrc/stream.cu need of Hopper (sm_90a) beside tile.cuh: barriers in shared memory, TMA, wgmma, registers by part.
#pragma once
#include "tile.cuh"

__device__ __forceinline__ void arrive(const u64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// At the block's own scope: a wait at the cluster's empties the L1.
__device__ __forceinline__ void wait(const u64 &barrier, u32 phase) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
                 "r"(phase)
                 : "memory");
}

// 16 bytes from global to shared memory.
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives at the barrier when all that this thread has copied so far has landed.
__device__ __forceinline__ void arrive_with_copies(const u64 &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void call_into_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// A box of a tensor map, from these coordinates on; what lies outside the tensor is zeros. Its bytes arrive at the barrier.
__device__ __forceinline__ void fetch_box(u32 to, const void *map, int c0, int c1, int c2, int c3, const u64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(&barrier))
                 : "memory");
}

// Operands of wgmma in shared memory, rows of 128 bytes swizzled. K-major: 8 rows 1024 bytes apart. MN-major: 64 elements of N a
// row, 8 rows of K 1024 bytes apart, the next 64 elements 8 KB on.
__device__ __forceinline__ u64 k_major(u32 address) { return (u64)(address >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
__device__ __forceinline__ u64 n_major(u32 address) { return (u64)(address >> 4) | (u64)512 << 16 | (u64)64 << 32 | (u64)1 << 62; }
static constexpr u32 K_MAJOR_16 = 2, N_MAJOR_16 = 128; // from 16 of K to the next 16

// d += a b: 64 × 256 by 16, d spread over four warps as the PTX manual has it.
#define D8(i) "%" #i "0, %" #i "1, %" #i "2, %" #i "3, %" #i "4, %" #i "5, %" #i "6, %" #i "7, %" #i "8, %" #i "9, "
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
template <bool TRANSPOSED> __device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " D8(1) D8(2) D8(3) D8(4) D8(5)
                     D8(6) D8(7) D8(8) D8(9) D8(10) D8(11) "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 0, %130;"
                 : F16(0), F16(16), F16(32), F16(48), F16(64), F16(80), F16(96), F16(112)
                 : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0));
}
// … and by half as many columns.
template <bool TRANSPOSED> __device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " D8(1) D8(2) D8(3) D8(4) D8(5)
                     "%60, %61, %62, %63}, %64, %65, 1, 1, 1, 0, %66;"
                 : F16(0), F16(16), F16(32), F16(48)
                 : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0));
}
// d = a b, whatever d was.
template <bool TRANSPOSED> __device__ __forceinline__ void multiply_first(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " D8(1) D8(2) D8(3) D8(4) D8(5)
                     "%60, %61, %62, %63}, %64, %65, 0, 1, 1, 0, %66;"
                 : F16(0), F16(16), F16(32), F16(48)
                 : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0));
}
// … by 64.
template <bool TRANSPOSED> __device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " D8(1) D8(2)
                     "%30, %31}, %32, %33, 1, 1, 1, 0, %34;"
                 : F16(0), F16(16)
                 : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0));
}
// … by 32.
template <bool TRANSPOSED> __device__ __forceinline__ void multiply(float (&d)[16], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                 "%10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, %18;"
                 : F16(0)
                 : "l"(a), "l"(b), "n"(TRANSPOSED ? 1 : 0));
}
#undef F16
#undef F4
#undef D8
__device__ __forceinline__ void multiplies_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void multiplies_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void multiplies_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Nothing reads d ahead of this.
template <u32 COUNT> __device__ __forceinline__ void multiplied(float (&d)[COUNT]) {
    multiplies_wait<0>();
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Registers of a thread, for the four warps that call it.
template <int N> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Whether it holds for any of the THREADS that meet at named barrier `number`.
template <int THREADS> __device__ __forceinline__ bool any_of(u32 number, bool mine) {
    u32 r;
    asm volatile("{\n.reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "barrier.red.or.pred q, %2, %3, p;\n"
                 "selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(r)
                 : "r"((u32)mine), "r"(number), "n"(THREADS)
                 : "memory");
    return r;
}

// Shared memory. What is written so the matrix units may read behind the fence.
__device__ __forceinline__ void written_for_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store16(u32 to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32 load2(u32 from) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ float product(float a, float b) { // never part of an fma
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ u32 two(float first, float second) { // rounded to bf16
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
__device__ __forceinline__ u32 exchange(u32 v, u32 with) { return __shfl_xor_sync(~0u, v, with); }

__device__ __forceinline__ u32 products(u32 a, u32 b) { // of two bf16 each
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

struct Two { float first, second; };
__device__ __forceinline__ Two two_of_e4m3(u16 bytes) {
    Two r;
    asm("{\n.reg .b16 a, b;\n"
        ".reg .b32 both;\n"
        "cvt.rn.f16x2.e4m3x2 both, %2;\n"
        "mov.b32 {a, b}, both;\n"
        "cvt.f32.f16 %0, a;\n"
        "cvt.f32.f16 %1, b;\n}"
        : "=f"(r.first), "=f"(r.second)
        : "h"(bytes));
    return r;
}
