"""The C++ of attention, as templates of Inductor's: tiles of 64 slots, laid out once for 16 rows (FLOATS: 64) that share a key head and multiplied by
the kernel that multiplies weights. PAIRS: in bfloat16, for processors that multiply pairs (AVX512-BF16, tiles). FLOATS: in float32 inside, of
bfloat16 and float32, for others.

Both keep a row's greatest score and the sums over it (Milakov & Gimelshein 2018, as in FlashAttention, 2205.14135), in one order, whatever stands
beside.
"""

PAIRS = r"""
{{template.header().getvalue()}}
{{product.codegen_define(kernel)}}

// exp(x) of x <= 0: exactly 1 at 0, NaN of NaN, and exactly 0 where it would be no normal number, which processors take a hundred times as long to make
static inline __m512 {{name}}_exp(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_NLT_UQ);
    const __m512 t = _mm512_maskz_mul_ps(some, x, _mm512_set1_ps(1.44269504f));
    const __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(0.0013333558f);
    for (float c : {0.0096181291f, 0.0555041087f, 0.2402265070f, 0.6931471806f, 1.f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(some, p, n);
}

// 32 dims of up to 16 keys: pairs of dims, by slot
static inline void {{name}}_turn(const at::BFloat16* k, int64_t stride, int64_t slots, at::BFloat16* out) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = i < slots ? _mm512_loadu_si512(k + i * stride) : _mm512_setzero_si512();
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 2 * {{block}}, r[i]);
}

// 32 dims of two slots' values (none: zeros): pairs of slots, by dim
static inline void {{name}}_pair(const at::BFloat16* a, const at::BFloat16* b, at::BFloat16* out) {
    const __m512i x = a ? _mm512_loadu_si512(a) : _mm512_setzero_si512(), y = b ? _mm512_loadu_si512(b) : _mm512_setzero_si512();
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(0x00010001)), _mm512_set1_epi32(0x00200000));  // dim i of both
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(x, high, y));
}

// One row's scores of a tile: weights in place of scores, and the sums and values so far made smaller where the greatest score grew
static inline void {{name}}_weigh(const float* s, const at::BFloat16* mask, int64_t here, at::BFloat16* p, float* top, float* sum, float* o) {
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 x[{{block // 16}}], most = none, total = _mm512_setzero_ps();
    for (int64_t i = 0; i < {{block // 16}}; ++i) {
        const int64_t left = std::max<int64_t>(std::min<int64_t>(16, here - 16 * i), 0);
        const __mmask16 some = (__mmask16)((1u << left) - 1);
        const __m512 add = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, mask + 16 * i)), 16));
        x[i] = _mm512_mask_fmadd_ps(_mm512_loadu_ps(s + 16 * i), some, _mm512_set1_ps({{scale}}f), add);
        x[i] = _mm512_mask_blend_ps(some, none, x[i]);
        most = _mm512_max_ps(most, x[i]);
    }
    const float now = std::max(*top, _mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < {{block // 16}}; ++i) {
        const __m512 e = {{name}}_exp(_mm512_sub_ps(x[i], _mm512_set1_ps(now)));
        total = _mm512_add_ps(total, e);
        _mm256_storeu_si256((__m256i*)(p + 16 * i), (__m256i)_mm512_cvtneps_pbh(e));
    }
    if (*top != now) {
        const float fade = _mm512_cvtss_f32({{name}}_exp(_mm512_set1_ps(*top - now)));
        *sum *= fade;
        for (int64_t d = 0; d < {{dims}}; d += 16) _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(fade)));
    }
    *sum += _mm512_reduce_add_ps(total);
    *top = now;
}

extern "C" {{kernel.def_kernel(inputs={"query": query, "key": key, "value": value, "mask": mask}, outputs={"out": out})}} {
    constexpr int64_t D = {{dims}}, T = {{block}}, R = 16, N = {{columns}};  // dims, slots a tile, rows that share one, columns of a product
    const int64_t heads = {{kernel.size(query, 1)}}, rows = {{kernel.size(query, 2)}}, width = {{kernel.size(mask, 2)}}, slots = {{kernel.size(key, 2)}};
    const int64_t k_slot = {{kernel.stride(key, 2)}}, v_slot = {{kernel.stride(value, 2)}}, parts = (rows + R - 1) / R;
    #pragma omp parallel for
    for (int64_t part = 0; part < {{kernel.size(query, 0)}} * heads * parts; ++part) {
        const int64_t b = part / (heads * parts), h = part / parts % heads, first = part % parts * R, n = std::min(R, rows - first);
        const at::BFloat16 *q = &{{kernel.index(query, ["b", "h", "first", 0])}}, *k = &{{kernel.index(key, ["b", "h", 0, 0])}};
        const at::BFloat16* v = &{{kernel.index(value, ["b", "h", 0, 0])}};
        alignas(64) at::BFloat16 kt[D * T], vt[T * D], p[R * T];
        alignas(64) float s[R * T], o[R * D], top[R], sum[R];
        std::fill(top, top + n, -std::numeric_limits<float>::infinity());
        std::fill(sum, sum + n, 0.f);
        std::fill(o, o + n * D, 0.f);
        {{product.codegen_init(kernel)}}
        for (int64_t at = 0; at < slots; at += T) {
            const int64_t here = std::min(T, slots - at);
            for (int64_t g = 0; g < T; g += 16)
                for (int64_t d = 0; d < D; d += 32)
                    {{name}}_turn(k + (at + g) * k_slot + d, k_slot, std::max<int64_t>(std::min<int64_t>(16, here - g), 0), kt + d * T + 2 * g);
            for (int64_t j = 0; j < T; j += 2)
                for (int64_t d = 0; d < D; d += 32)
                    {{name}}_pair(j < here ? v + (at + j) * v_slot + d : nullptr, j + 1 < here ? v + (at + j + 1) * v_slot + d : nullptr,
                                  vt + d / T * T * T + j * T + 2 * (d % T));
            for (int64_t c = 0; c < T; c += N) {{name}}_product<false>({{state}}q, kt + 2 * c, s + c, n, N, D, D, T, T);
            for (int64_t r = 0; r < n; ++r)
                {{name}}_weigh(s + r * T, &{{kernel.index(mask, ["b", 0, "(first + r) % width", "at"])}}, here, p + r * T, top + r, sum + r, o + r * D);
            for (int64_t d = 0; d < D; d += N) {{name}}_product<true>({{state}}p, vt + d / T * T * T + 2 * (d % T), o + d, n, N, T, T, T, D);
        }
        {{product.codegen_finalize(kernel)}}
        for (int64_t r = 0; r < n; ++r)
            for (int64_t d = 0; d < D; d += 16)
                _mm256_storeu_si256(
                    (__m256i*)(out + ((b * width + (first + r) % width) * heads * (rows / width) + h * (rows / width) + (first + r) / width) * D + d),
                    (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(_mm512_loadu_ps(o + r * D + d), _mm512_set1_ps(sum[r]))));
    }
}
"""

FLOATS = r"""
{{template.header().getvalue()}}
{{product.codegen_define(kernel)}}

using {{name}}_V = at::vec::Vectorized<float>;

static inline {{name}}_V {{name}}_load(const {{type}}* at) {
{%- if halves %}
    {{name}}_V x;
    at::vec::load_fp32_from_bf16(at, x);
    return x;
{%- else %}
    return {{name}}_V::loadu(at);
{%- endif %}
}

// Eight keys, by dim{% if halves %}: pairs of dims change places with keys, and are widened then{% endif %}
static inline void {{name}}_eight(const {{type}}* k, int64_t stride, float* out) {
{%- if halves %}
    alignas(32) float pairs[8 * 8];
    for (int64_t d = 0; d < {{dims}}; d += 16) {
        at::vec::transpose_mxn<float, 8, 8>((const float*)(k + d), stride / 2, pairs, 8);
        _Pragma("GCC unroll 8") for (int64_t i = 0; i < 8; ++i) {
            const __m256i x = _mm256_load_si256((const __m256i*)(pairs + 8 * i));
            _mm256_storeu_si256((__m256i*)(out + (d + 2 * i) * {{block}}), _mm256_slli_epi32(x, 16));
            _mm256_storeu_si256((__m256i*)(out + (d + 2 * i + 1) * {{block}}), _mm256_and_si256(x, _mm256_set1_epi32(0xffff0000)));
        }
    }
{%- else %}
    for (int64_t d = 0; d < {{dims}}; d += 8) at::vec::transpose_mxn<float, 8, 8>(k + d, stride, out + d * {{block}}, {{block}});
{%- endif %}
}

// `here` keys of a tile (the others: zeros), by dim
static inline void {{name}}_turn(const {{type}}* k, int64_t stride, int64_t here, float* out) {
    for (int64_t j = 0; j < {{block}}; j += 8) {
        if (here >= j + 8 && stride % 2 == 0) {
            {{name}}_eight(k + j * stride, stride, out + j);
            continue;
        }
        alignas(64) {{type}} last[8 * {{dims}}] = {};
        for (int64_t i = 0; j + i < here; ++i) std::copy_n(k + (j + i) * stride, {{dims}}, last + i * {{dims}});
        {{name}}_eight(last, {{dims}}, out + j);
    }
}

// exp(x) of x <= 0, to 2^-22 of it or as much of x: exactly 1 at 0, NaN of NaN, and exactly 0 where it would be no normal number, which processors take a
// hundred times as long to make. What is added to t leaves whole numbers in the last bits of it
static inline {{name}}_V {{name}}_exp({{name}}_V x) {
    using V = {{name}}_V;
    const V whole(12582912.f), t = at::vec::fmadd(x, V(1.44269504f), whole), f = at::vec::fmadd(x, V(1.44269504f), whole - t);
    V p(0.00015403530f);
    for (float c : {0.0013333558f, 0.0096181291f, 0.0555041087f, 0.2402265070f, 0.6931471806f, 1.f}) p = at::vec::fmadd(p, f, V(c));
    const V e(_mm{{bits}}_castsi{{bits}}_ps(_mm{{bits}}_add_epi32(_mm{{bits}}_castps_si{{bits}}(p), _mm{{bits}}_slli_epi32(_mm{{bits}}_castps_si{{bits}}(t), 23))));
    return V::blendv(e, V(0.f), x < V(-87.f));
}

// One row's scores of a tile: weights in place of scores, and the sums and values so far made smaller where the greatest score grew
static inline void {{name}}_weigh(float* s, const {{type}}* mask, int64_t here, float* top, float* sum, float* o) {
    using V = {{name}}_V;
    constexpr int64_t S = V::size();
    const float none = -std::numeric_limits<float>::infinity();
    V x[{{block}} / S], most(none), total(0.f);
    for (int64_t i = 0; i < {{block}} / S; ++i) {
        V add;
        if (here >= S * (i + 1)) {
            add = {{name}}_load(mask + S * i);
        } else {
            alignas(64) float some[S];
            for (int64_t j = 0; j < S; ++j) some[j] = S * i + j < here ? (float)mask[S * i + j] : none;
            add = V::loadu(some);
        }
        x[i] = at::vec::fmadd(V::loadu(s + S * i), V({{scale}}f), add);
        most = at::vec::maximum(most, x[i]);
    }
    const float now = std::max(*top, most.reduce_max());
    for (int64_t i = 0; i < {{block}} / S; ++i) {
        const V e = {{name}}_exp(x[i] - V(now));
        total = total + e;
        e.store(s + S * i);
    }
    if (*top != now) {
        const float fade = *top - now < -87.f ? 0.f : std::exp(*top - now);
        *sum *= fade;
        for (int64_t d = 0; d < {{dims}}; d += S) (V::loadu(o + d) * V(fade)).store(o + d);
    }
    *sum += total.reduce_add();
    *top = now;
}

extern "C" {{kernel.def_kernel(inputs={"query": query, "key": key, "value": value, "mask": mask}, outputs={"out": out})}} {
    using V = {{name}}_V;
    constexpr int64_t D = {{dims}}, T = {{block}}, R = 64, N = {{columns}}, S = V::size();  // dims, slots a tile, most rows that share one, columns of a product
    const int64_t heads = {{kernel.size(query, 1)}}, rows = {{kernel.size(query, 2)}}, width = {{kernel.size(mask, 2)}}, slots = {{kernel.size(key, 2)}};
    const int64_t k_slot = {{kernel.stride(key, 2)}}, v_slot = {{kernel.stride(value, 2)}}, each = {{kernel.size(query, 0)}} * heads;
    const int64_t busy = std::min((omp_get_max_threads() + each - 1) / each, (rows + 7) / 8);  // parts of a head's rows with which no thread is idle
    const int64_t least = std::max((rows + R - 1) / R, busy), tall = (rows + least - 1) / least, parts = (rows + tall - 1) / tall;
    #pragma omp parallel for
    for (int64_t part = 0; part < each * parts; ++part) {
        const int64_t b = part / (heads * parts), h = part / parts % heads, first = part % parts * tall, n = std::min(tall, rows - first);
        const {{type}} *q = &{{kernel.index(query, ["b", "h", "first", 0])}}, *k = &{{kernel.index(key, ["b", "h", 0, 0])}};
        const {{type}}* v = &{{kernel.index(value, ["b", "h", 0, 0])}};
        alignas(64) float ask[R * D], kt[D * T], s[R * T], o[R * D], top[R], sum[R];
        for (int64_t i = 0; i < n * D; i += S) {{name}}_load(q + i).store(ask + i);
        std::fill(top, top + n, -std::numeric_limits<float>::infinity());
        std::fill(sum, sum + n, 0.f);
        std::fill(o, o + n * D, 0.f);
        for (int64_t at = 0; at < slots; at += T) {
            const int64_t here = std::min(T, slots - at);
            {{name}}_turn(k + at * k_slot, k_slot, here, kt);
            for (int64_t c = 0; c < T; c += N) {{name}}_product<false>(ask, kt + c, s + c, n, N, D, D, T, T);
            for (int64_t r = 0; r < n; ++r)
                {{name}}_weigh(s + r * T, &{{kernel.index(mask, ["b", 0, "(first + r) % width", "at"])}}, here, top + r, sum + r, o + r * D);
{%- if halves %}
            for (int64_t j = 0; j < here; ++j)
                for (int64_t d = 0; d < D; d += S) {{name}}_load(v + (at + j) * v_slot + d).store(kt + j * D + d);  // keys of this tile are done with
            for (int64_t d = 0; d < D; d += N) {{name}}_product<true>(s, kt + d, o + d, n, N, here, T, D, D);
{%- else %}
            for (int64_t d = 0; d < D; d += N) {{name}}_product<true>(s, v + at * v_slot + d, o + d, n, N, here, T, v_slot, D);
{%- endif %}
        }
        for (int64_t r = 0; r < n; ++r) {
            {{type}}* to = out + ((b * width + (first + r) % width) * heads * (rows / width) + h * (rows / width) + (first + r) / width) * D;
            const auto part_of = [&](int64_t d) { return V::loadu(o + r * D + d) / V(sum[r]); };
{%- if halves %}
            for (int64_t d = 0; d < D; d += 2 * S) at::vec::convert_from_float<{{type}}>(part_of(d), part_of(d + S)).store(to + d);
{%- else %}
            for (int64_t d = 0; d < D; d += S) part_of(d).store(to + d);
{%- endif %}
        }
    }
}
"""
