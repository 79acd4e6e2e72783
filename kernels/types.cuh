// Integer names and the few device intrinsics that every kernel uses. No CUDA header is needed: NVRTC knows the
// intrinsics. This file must not know what a kernel computes.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "the kernels count on these widths");

// Reads that are used once and need not stay in the caches.
__device__ __forceinline__ uint4 load_once(const u8* p) {
    return __ldcs(reinterpret_cast<const uint4*>(p));
}

__device__ __forceinline__ void store_once(u8* p, uint4 value) {
    __stcs(reinterpret_cast<uint4*>(p), value);
}

// Sixteen bytes to shared memory without a register in between; complete for this thread once its group was waited for.
__device__ __forceinline__ void copy_async(void* shared, const u8* global) {
    const u32 to = u32(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last LEFT groups of this thread have arrived. The others that read them must synchronise afterwards.
template <int LEFT>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
