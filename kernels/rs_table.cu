// Reed-Solomon with a matrix known only at run time: products by byte-permute (gf_table.cuh).
// launch: rs_table_R: 256 threads a block, 16 bytes a thread; any grid (blocks loop), best resident: 4 blocks an SM,
// at most ceil(len / 4096).
//
// out[r] = sum over c of matrix[row0 + r][c] * in[c] for r in 0..R; `tables` starts at row 0 of the matrix, `out` at
// the first output of this pass. len is a multiple of 16, lds are too. More rows than R: further launches.
#include "gf_table.cuh"

// Columns whose loads are in flight together.
#ifndef TABLE_AHEAD
#define TABLE_AHEAD 4
#endif

template <int ROWS>
__device__ __forceinline__ void rs_table(const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len,
                                         u32 n, u32 row0) {
    __shared__ SharedTables<ROWS> shared;
    shared.fill(tables, n, row0);
    __syncthreads();
    const u64 step = u64(gridDim.x) * blockDim.x * 16;
    for (u64 at = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < len; at += step) {
        Split acc[ROWS] = {};
        const u8* source = in + at;
        u32 column = 0;
        for (; column + TABLE_AHEAD <= n; column += TABLE_AHEAD, source += TABLE_AHEAD * in_ld) {
            uint4 data[TABLE_AHEAD];
#pragma unroll
            for (int i = 0; i < TABLE_AHEAD; i++) data[i] = load_once(source + i * in_ld);
#pragma unroll
            for (int i = 0; i < TABLE_AHEAD; i++) {
                const Selectors s = selectors(data[i]);
#pragma unroll
                for (int row = 0; row < ROWS; row++) add_product(acc[row], s, shared.at(column + i, row));
            }
        }
        for (; column < n; column++, source += in_ld) {
            const Selectors s = selectors(load_once(source));
#pragma unroll
            for (int row = 0; row < ROWS; row++) add_product(acc[row], s, shared.at(column, row));
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) store_once(out + row * out_ld + at, joined(acc[row]));
    }
}

#define KERNEL(ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) rs_table_##ROWS(                                            \
        const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len, u32 n, u32 row0) {              \
        rs_table<ROWS>(tables, in, in_ld, out, out_ld, len, n, row0);                                             \
    }

KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(8)
