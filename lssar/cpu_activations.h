// The activations phi, each with its value and its slope from shared parts, and powers.
//
// exp, sigmoid and softplus take scores in base 2, t = s log2(e), which saves a product per entry.
// softplus is over ln 2 then: rows are normalised, and do not change when they are scaled.
#pragma once
#include "cpu_vector.h"

namespace {

// 2^x for -126 <= x <= 126: FINE to 1 ulp, else to 1.1e-7 relative, with errors of either sign that
// a mean evens out
template <bool FINE = true>
inline vf exp2v(vf x) {
  const vf magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  vf t = x + magic, r = x - (t - magic), square = r * r, y;
  if (FINE) {
    vf high = (all(1.535275e-4f) * r + all(1.3398874e-3f)) * r + all(9.6184373e-3f);
    vf low = (all(5.5503324e-2f) * r + all(2.4022648e-1f)) * r + all(6.9314720e-1f);
    y = (high * square * r + low) * r + all(1.f);
  } else {
    vf high = all(1.3264727e-3f) * r + all(9.671513e-3f);
    vf low = all(5.5507336e-2f) * r + all(2.4022242e-1f);
    y = (high * square + low) * square + (all(6.93147e-1f) * r + all(1.f));
  }
  return bits(bits(y) + (bits(t) << 23));
}

// log2(x) for normal x > 0, to 1e-7 relative also near 1
inline vf log2v(vf x) {
  vi e = (bits(x) - 0x3f3504f3) >> 23;
  vf t = bits(bits(x) - (e << 23)) - all(1.f);
  vf y = all(-0.10994941f);
  y = y * t + all(0.18617489f);
  y = y * t + all(-0.19106278f);
  y = y * t + all(0.20460063f);
  y = y * t + all(-0.23961740f);
  y = y * t + all(0.28856741f);
  y = y * t + all(-0.36069665f);
  y = y * t + all(0.48089824f);
  y = y * t + all(-0.72134735f);
  y = y * t + all(1.44269504f);
  return y * t + __builtin_convertvector(e, vf);
}

inline vf minus_abs(vf x) { return bits(bits(x) | INT32_MIN); }
inline vf absolute(vf x) { return bits(bits(x) & INT32_MAX); }
inline vf zero_below(vf x, vf y) { return bits(bits(y) & (x > all(0.f))); }  // y where x > 0

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr float LOWEST = -126.f;

struct Both {  // of a score
  vf value, slope;
};

// Each has UNIT, what a score is multiplied by beforehand; SIGNED, whether values can be negative;
// value(t) and both(t). A sharpened one increases, and has score(f), the t with value f or less.

struct Exp {
  static constexpr float UNIT = LOG2_E;
  static constexpr bool SIGNED = false;
  static vf value(vf t) {
    vf y = exp2v(minimum(maximum(t, all(LOWEST)), all(127.f)));
    y = where(t < all(LOWEST), all(0.f), y);
    return where(t >= all(128.f), all(INFINITY), where(t > all(127.f), over_127(t), y));
  }
  static vf below_one(vf t) {  // for t <= 0
    return where(t < all(LOWEST), all(0.f), exp2v(maximum(t, all(LOWEST))));
  }
  static Both both(vf t) {
    vf y = value(t);
    return {y, y * all(LN_2)};
  }
  static vf score(vf f) { return log2v(maximum(f, all(FLT_MIN))) - all(2e-3f); }

 private:
  static vf over_127(vf t) { return exp2v(minimum(t, all(128.f)) - all(1.f)) * all(2.f); }
};

struct Sigmoid {
  static constexpr float UNIT = LOG2_E;
  static constexpr bool SIGNED = false;
  static vf value(vf t) {  // a rounded inverse would be too coarse to be sharpened
    vf e = Exp::below_one(minus_abs(t));
    return where(t < all(0.f), e, all(1.f)) / (all(1.f) + e);
  }
  static Both both(vf t) {  // the same bits: sharpening would enlarge a difference to the forward
    vf e = Exp::below_one(minus_abs(t)), whole = all(1.f) + e;
    vf y = all(1.f) / whole;
    return {where(t < all(0.f), e, all(1.f)) / whole, e * y * y * all(LN_2)};
  }
  static vf score(vf f) {
    vf g = minimum(maximum(f, all(FLT_MIN)), all(0.99999994f));
    return log2v(g) - log2v(all(1.f) - g) - all(2e-3f);
  }
};

struct Softplus {
  static constexpr float UNIT = LOG2_E;
  static constexpr bool SIGNED = false;
  static vf value(vf t) { return value(t, Exp::below_one(minus_abs(t))); }
  static Both both(vf t) {
    vf e = Exp::below_one(minus_abs(t));
    return {value(t, e), where(t < all(0.f), e, all(1.f)) * inverse(all(1.f) + e)};
  }
  static vf slope(vf t) {
    vf e = exp2v(maximum(minus_abs(t), all(LOWEST)));
    return where(t < all(0.f), e, all(1.f)) * inverse(all(1.f) + e);
  }
  static vf score(vf f) {  // log2(2^f - 1), rounded down
    vf tiny = log2v(maximum(f, all(FLT_MIN))) - all(0.53f);  // 2^f - 1 = f ln 2
    vf medium = log2v(maximum(exp2v(minimum(f, all(20.f))) - all(1.f), all(1e-6f)));
    return where(f < all(1e-3f), tiny, where(f < all(20.f), medium, f)) - all(2e-3f);
  }

 private:
  static vf value(vf t, vf e) {  // e = 2^-|t|
    // Estrin's scheme: a chain of ten multiplications would outlast what a processor looks ahead
    vf e2 = e * e, e4 = e2 * e2;
    vf a = all(7.5491729e-3f) * e + all(-4.2567025e-2f);
    vf b = all(1.1285613e-1f) * e + all(-1.9711892e-1f);
    vf c = all(2.7564139e-1f) * e + all(-3.5840847e-1f);
    vf d = all(4.8069296e-1f) * e + all(-7.2134021e-1f);
    vf y = (a * e2 + b) * e4 + (c * e2 + d);
    return (y * e + all(1.4426950f)) * e + maximum(t, all(0.f));
  }
};

struct Identity {
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = true;
  static vf value(vf t) { return t; }
  static Both both(vf t) { return {t, all(1.f)}; }
};

struct Relu {
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = false;
  static vf value(vf t) { return maximum(t, all(0.f)); }
  static Both both(vf t) { return {value(t), zero_below(t, all(1.f))}; }
};

struct Relu2 {
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = false;
  static vf value(vf t) { return both(t).value; }
  static Both both(vf t) {
    vf y = maximum(t, all(0.f));
    return {y * y, y + y};
  }
};

struct Relu6 {
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = false;
  static vf value(vf t) { return minimum(maximum(t, all(0.f)), all(6.f)); }
  static Both both(vf t) { return {value(t), bits(bits(zero_below(t, all(1.f))) & (t < all(6.f)))}; }
};

struct Gelu {  // x Phi(x), Phi the normal distribution
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = true;
  static vf value(vf x) { return x * distribution(x, density(x)); }
  static Both both(vf x) {
    vf e = density(x), y = distribution(x, e);
    return {x * y, y + x * e * all(0.39894228f)};
  }

 private:
  static vf density(vf x) {  // exp(-x^2 / 2), zero where Phi, 1 / 32 of it, is no normal number
    vf t = x * x * all(-0.5f * LOG2_E);
    return where(t < all(LOWEST + 5.f), all(0.f), Exp::below_one(t));
  }
  static vf distribution(vf x, vf e) {  // erfc(z) exp(z^2) is a polynomial of 1 / (1 + 0.3 z)
    vf z = absolute(x) * all(0.70710678f), t = inverse(all(1.f) + all(0.3f) * z) - all(0.5f);
    vf y = all(-0.12977780f);
    y = y * t + all(-0.097049177f);
    y = y * t + all(0.26425198f);
    y = y * t + all(0.79366148f);
    y = y * t + all(1.2380055f);
    y = y * t + all(1.4053770f);
    y = y * t + all(1.2699927f);
    y = y * t + all(0.95061028f);
    y = y * t + all(0.60150355f);
    y = y * t + all(0.16248997f);
    y = y * e * all(0.5f);
    return where(x < all(0.f), y, all(1.f) - y);
  }
};

struct Mish {  // x tanh(softplus(x)); with w = e^x, tanh = (w^2 + 2 w) / (w^2 + 2 w + 2)
  static constexpr float UNIT = 1.f;
  static constexpr bool SIGNED = true;
  static vf value(vf x) { return both(x).value; }
  static Both both(vf x) {
    vf e = Exp::below_one(minus_abs(x) * all(LOG2_E)), e2 = e * e;
    vi negative = x < all(0.f);
    vf up = where(negative, e2 + e + e, all(1.f) + e + e);
    vf below = where(negative, all(2.f), e2 + e2);  // the denominator less `up`
    vf part = inverse(up + below), tanh = up * part;
    vf sigmoid = where(negative, e, all(1.f)) * inverse(all(1.f) + e);
    return {x * tanh, tanh + x * (below * part) * (all(1.f) + tanh) * sigmoid};
  }
};

// z^p for 0 <= z <= 1; 0 at z = 0 also for p = 0, as relu'(0) = 0. The whole part of p by squaring:
// exp2(p log2 z) alone would lose p log2(z) ulps. An int cannot hold any p, and beyond 1e9 the
// row's largest z, a few ulps below 1 by rounding, would vanish too and leave 0/0.
constexpr float LARGEST_P = 1e7f;
inline vf power(vf z, float p) {
  p = std::min(p, LARGEST_P);
  int whole = (int)p;
  float rest = p - (float)whole;
  vf y = all(1.f), square = z;
  if (p == 14.f) {  // the paper's 15, without a loop
    vf z2 = z * z, z4 = z2 * z2;
    return zero_below(z, z2 * z4 * (z4 * z4));
  }
  for (int n = whole; n; n >>= 1) {
    if (n & 1) y = y * square;
    square = square * square;
  }
  if (rest != 0.f) y = y * exp2v(maximum(all(rest) * log2v(maximum(z, all(FLT_MIN))), all(LOWEST)));
  return zero_below(z, y);
}

// the same with an exponent for each lane
inline vf power(vf z, vf p) {
  p = minimum(p, all(LARGEST_P));
  vi whole = __builtin_convertvector(p, vi);
  vf rest = p - __builtin_convertvector(whole, vf), y = all(1.f), square = z;
  for (vi n = whole; lanes(n != 0); n >>= 1) {
    y = where((n & 1) != 0, y * square, y);
    square = square * square;
  }
  vf root = exp2v(maximum(rest * log2v(maximum(z, all(FLT_MIN))), all(LOWEST)));
  return zero_below(z, where(rest > all(0.f), y * root, y));
}

}  // namespace
