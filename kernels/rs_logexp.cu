// Reed-Solomon by logarithms: c * x = exp(log c + log x), the way of Gibraltar. The baseline of the other kernels, and
// the one that takes any leading dimension and any length.
// launch: rs_logexp_R: 256 threads a block, 4 bytes a thread; any grid (blocks loop), best resident: 4 blocks an SM,
// at most ceil(len / 1024): each block first fills 33 to 41 KB of shared memory.
//
// out[r] = sum over c of rs_logexp_matrix[(row0 + r) * n + c] * in[c] for r in 0..R; `out` starts at the first output
// of this pass; n <= 255. Branch-free over the data: the logarithm of zero is so large that every sum with it falls
// where the table of powers is zero.
//
// The table of powers exists once for each lane, in that lane's own bank: one shared table costs about three passes
// a lookup, since 32 random words of it fall on some bank about three times; that, not the registers, is what made the
// many-output kernels slow. Four powers share a word (t, t + 256, t + 512, t + 768), so all copies take 32 KiB.
#include "types.cuh"

#define COLUMNS_MAX 255
#define ZERO_LOG 510

// Logarithms are kept times 128, the distance of two rows of the copies.
struct Tables {
    u16 log[256];
    // Powers t and t + 256 of the generator, low byte first; zero from 509 on.
    u16 power[256];

    __device__ constexpr Tables() : log(), power() {
        u8 exp[512] = {};
        u32 x = 1;
        for (u32 t = 0; t < 509; t++) {
            exp[t] = u8(x);
            if (t < 255) log[x] = u16(t * 128);
            x = x << 1 ^ (x & 128 ? 0x11D : 0);
        }
        log[0] = ZERO_LOG * 128;
        for (u32 t = 0; t < 256; t++) power[t] = u16(exp[t] | exp[t + 256] << 8);
    }
};

__constant__ Tables tables = Tables();
// Written by the host before a launch: the matrix, row-major.
extern "C" {
__constant__ u8 rs_logexp_matrix[16384];
}

template <int ROWS>
struct Staged {
    u32 power[256][32];
    u16 log[256];
    // Logarithms of the matrix, column by column.
    __align__(16) u16 matrix[COLUMNS_MAX * ROWS];

    __device__ __forceinline__ void fill(u32 n, u32 row0) {
        for (u32 i = threadIdx.x; i < 256 * 32; i += blockDim.x) power[i / 32][i % 32] = tables.power[i / 32];
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x) log[i] = tables.log[i];
        for (u32 i = threadIdx.x; i < n * ROWS; i += blockDim.x)
            matrix[i] = tables.log[rs_logexp_matrix[(row0 + i % ROWS) * n + i / ROWS]];
    }
};

// Up to four bytes at any address.
__device__ __forceinline__ u32 load_bytes(const u8* p, u32 count) {
    u32 word = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (i < count) word |= u32(p[i]) << (8 * i);
    return word;
}

// Adds one column's word to all rows; accumulators hold one byte a register, in the low bits.
template <int ROWS>
__device__ __forceinline__ void add_column(u32 (&acc)[ROWS][4], const Staged<ROWS>& staged, const u8* lane_powers,
                                           u32 word, u32 column) {
    u32 log[4];
#pragma unroll
    for (int i = 0; i < 4; i++) log[i] = staged.log[word >> (8 * i) & 255];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const u32 factor = staged.matrix[column * ROWS + row];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // t = sum / 128: row t % 256 of the copies, byte t / 256 of the word.
            const u32 sum = log[i] + factor;
            acc[row][i] ^= lane_powers[(sum & 0x7F80) + (sum >> 15)];
        }
    }
}

template <int ROWS, bool WORDS>
__device__ __forceinline__ void one_place(const Staged<ROWS>& staged, const u8* in, u64 in_ld, u8* out, u64 out_ld,
                                          u32 n, u32 count) {
    // Columns whose loads are in flight together.
    constexpr u32 AHEAD = ROWS > 8 ? 2 : 4;
    const u8* lane_powers = reinterpret_cast<const u8*>(&staged.power[0][threadIdx.x % 32]);
    u32 acc[ROWS][4] = {};
    u32 column = 0;
#pragma unroll 1
    for (; column + AHEAD <= n; column += AHEAD, in += AHEAD * in_ld) {
        u32 word[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            word[i] = WORDS ? __ldcs(reinterpret_cast<const u32*>(in + i * in_ld)) : load_bytes(in + i * in_ld, count);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) add_column<ROWS>(acc, staged, lane_powers, word[i], column + i);
    }
#pragma unroll 1
    for (; column < n; column++, in += in_ld) {
        const u32 word = WORDS ? __ldcs(reinterpret_cast<const u32*>(in)) : load_bytes(in, count);
        add_column<ROWS>(acc, staged, lane_powers, word, column);
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        u8* place = out + row * out_ld;
        if (WORDS) {
            *reinterpret_cast<u32*>(place) = acc[row][0] | acc[row][1] << 8 | acc[row][2] << 16 | acc[row][3] << 24;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i < count) place[i] = u8(acc[row][i]);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void rs_logexp(const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len, u32 n, u32 row0) {
    __shared__ Staged<ROWS> staged;
    staged.fill(n, row0);
    __syncthreads();
    const bool aligned = ((u64(in) | in_ld | u64(out) | out_ld) & 3) == 0;
    const u64 step = u64(gridDim.x) * blockDim.x * 4;
    for (u64 at = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * 4; at < len; at += step) {
        const u32 count = len - at < 4 ? u32(len - at) : 4;
        if (aligned && count == 4) {
            one_place<ROWS, true>(staged, in + at, in_ld, out + at, out_ld, n, 4);
        } else {
            one_place<ROWS, false>(staged, in + at, in_ld, out + at, out_ld, n, count);
        }
    }
}

#define KERNEL(ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) rs_logexp_##ROWS(                                           \
        const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len, u32 n, u32 row0) {                                 \
        rs_logexp<ROWS>(in, in_ld, out, out_ld, len, n, row0);                                                    \
    }

KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(6)
KERNEL(8)
KERNEL(16)
