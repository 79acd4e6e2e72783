// Parity update of few changed columns: out[j] = parity[j] ^ sum over i of matrix[j][i] * (old[i] ^ new[i]).
// launch: rs_delta_R: 256 threads a block, 16 bytes a thread; any grid (blocks loop), best resident: 4 blocks an SM,
// at most ceil(len / 4096).
//
// One buffer of columns: [0, c) old, [c, 2c) new, [2c, 2c + r) old parity. Rows [row0, row0 + R) in this pass; `out`
// starts at the first output of this pass, `tables` at row 0 of the r x c matrix of the changed columns. Each old and
// new byte is read once for all rows of the pass. len and the lds are multiples of 16.
#include "gf_table.cuh"

template <int ROWS>
__device__ __forceinline__ void rs_delta(const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len,
                                         u32 c, u32 row0) {
    __shared__ SharedTables<ROWS> shared;
    shared.fill(tables, c, row0);
    __syncthreads();
    const u64 step = u64(gridDim.x) * blockDim.x * 16;
    for (u64 at = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < len; at += step) {
        Split acc[ROWS];
        const u8* parity = in + u64(2 * c + row0) * in_ld + at;
#pragma unroll
        for (int row = 0; row < ROWS; row++) acc[row] = split(load_once(parity + row * in_ld));
        const u8* before = in + at;
        const u8* after = before + c * in_ld;
#pragma unroll 2
        for (u32 column = 0; column < c; column++, before += in_ld, after += in_ld) {
            const uint4 x = load_once(before), y = load_once(after);
            const Selectors s = selectors(make_uint4(x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w));
#pragma unroll
            for (int row = 0; row < ROWS; row++) add_product(acc[row], s, shared.at(column, row));
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) store_once(out + row * out_ld + at, joined(acc[row]));
    }
}

// `r` is the number of rows of the matrix; the kernel needs it not, the signature is the same for every pass.
#define KERNEL(ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) rs_delta_##ROWS(                                            \
        const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len, u32 c, u32 r, u32 row0) {       \
        rs_delta<ROWS>(tables, in, in_ld, out, out_ld, len, c, row0);                                             \
    }

KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(8)
