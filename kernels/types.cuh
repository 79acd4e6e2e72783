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
