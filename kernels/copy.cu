// Gather from and scatter to host memory that is mapped into the device's address space, piece by piece.
// launch: gather, scatter: 256 threads a block, 16..96 blocks (they stay resident and loop), no shared memory.
//
// A warp takes a piece: it asks for 512 consecutive bytes at a time and for COPY_DEPTH such runs before the first
// store, for a round trip over the bus lasts about as long as 80 KB of it. Pieces may differ in length; the host cuts
// them so that there are several for each warp (16 KiB is a good length). Addresses are multiples of 16, lengths too.
#include "types.cuh"

// 16-byte loads of one thread in flight.
#ifndef COPY_DEPTH
#define COPY_DEPTH 8
#endif

struct Piece {
    u64 src;
    u64 dst;
    u64 bytes;
};

__device__ __forceinline__ void copy_piece(Piece piece, u32 lane) {
    const uint4* src = reinterpret_cast<const uint4*>(piece.src);
    uint4* dst = reinterpret_cast<uint4*>(piece.dst);
    const u64 units = piece.bytes / 16;
    u64 at = lane;
    for (; at + 32 * (COPY_DEPTH - 1) < units; at += 32 * COPY_DEPTH) {
        uint4 held[COPY_DEPTH];
#pragma unroll
        for (int i = 0; i < COPY_DEPTH; i++) held[i] = __ldcs(src + at + 32 * i);
#pragma unroll
        for (int i = 0; i < COPY_DEPTH; i++) __stcs(dst + at + 32 * i, held[i]);
    }
    // What is left is less than COPY_DEPTH runs for this lane: still all loads before the first store.
    uint4 held[COPY_DEPTH];
#pragma unroll
    for (int i = 0; i < COPY_DEPTH; i++)
        if (at + 32 * i < units) held[i] = __ldcs(src + at + 32 * i);
#pragma unroll
    for (int i = 0; i < COPY_DEPTH; i++)
        if (at + 32 * i < units) __stcs(dst + at + 32 * i, held[i]);
}

__device__ __forceinline__ void copy_pieces(const Piece* list, u32 count) {
    const u32 lane = threadIdx.x % 32;
    const u32 warps = gridDim.x * (blockDim.x / 32);
    // Neighbouring pieces go to different blocks, so that a short list still uses every block.
    for (u32 i = blockIdx.x + gridDim.x * (threadIdx.x / 32); i < count; i += warps) copy_piece(list[i], lane);
}

// Two names for one loop: profiles and the runtime's counters tell the directions apart.
extern "C" __global__ void __launch_bounds__(256) gather(const Piece* list, u32 count) { copy_pieces(list, count); }
extern "C" __global__ void __launch_bounds__(256) scatter(const Piece* list, u32 count) { copy_pieces(list, count); }
