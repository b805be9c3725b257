"""The paper's attention mechanisms one number at a time, in Python's float64.

Written from the paper's formulas alone: no tensor operation, no mask, no rescaling, nothing shared
with attention.py. Slow and literal on purpose. `weights(name, q, k)` takes the nested lists of one
head, q (Lq, d) and k (Lk, d), and returns the rows of the attention matrix.
"""

import math

import torch


def gelu(x):
    return x * 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def softplus(x):
    return math.log1p(math.exp(x)) if x < 30 else x + math.log1p(math.exp(-x))


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


PHI = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "gelu": gelu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "mish": lambda x: x * math.tanh(softplus(x)),
    "identity": lambda x: x,
    "exp": math.exp,
}


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / (math.sqrt(dot(a, a)) * math.sqrt(dot(b, b)))


def l1(row):
    total = math.fsum(abs(a) for a in row)
    return [a / total for a in row] if total > 0 else row


def softmax(x):
    top = max(x)
    return l1([math.exp(value - top) for value in x])


def reweight(row, p):
    """l1(relu(N A - 1[N > 3])^p); a row with nothing above its mean stays as it was."""
    n = len(row)
    y = [max(n * a - (1.0 if n > 3 else 0.0), 0.0) for a in row]
    return l1([value**p for value in y]) if max(y) > 0 else row


def broken_stick(x):
    """From the query's own key backwards, each breaks sigmoid(x) off; the own key has the rest."""
    left, row = 1.0, [0.0] * len(x)
    for j in reversed(range(len(x) - 1)):
        row[j] = left * sigmoid(x[j])
        left *= 1.0 - sigmoid(x[j])
    return [*row[:-1], left]


def adaptive_p(p, alpha, n, train_length):
    return p if n <= train_length else p * (1.0 + alpha * (math.sqrt(n / train_length) - 1.0))


def row(name, q, keys, *, p=15.0, alpha=0.0, train_length=1024, length=None, param=None, falls=()):
    """The weights of query vector q on the keys that it sees (itself included).

    length is the paper's L (train_length when absent); param the learnable scalar of the head;
    falls what is added to each score for the way from its key to the query.
    """
    n, d = len(keys), len(q)
    big_l = train_length if length is None else length
    exponent = adaptive_p(p, alpha, n, train_length)
    fall = falls or [0.0] * n
    if name in ("cos-softmax-constant", "cos-softmax-fixed"):
        scale = math.log(d) * math.log(train_length) if name.endswith("fixed") else math.sqrt(d)
        scores = [scale * cosine(q, key) for key in keys]
        return softmax([a + b for a, b in zip(scores, fall, strict=True)])
    if name in ("lssa", "lssar", "cos-softmax", "cos-ssmax"):
        scale = math.log(d) * math.log(n)
        if name == "cos-ssmax" and param is not None:
            scale *= param
        scores = [scale * cosine(q, key) + b for key, b in zip(keys, fall, strict=True)]
        if name.startswith("cos-"):
            return softmax(scores)
        a = l1([softplus(score) for score in scores])
        return a if name == "lssa" else reweight(a, exponent)

    x = [dot(q, key) / math.sqrt(d) + b for key, b in zip(keys, fall, strict=True)]
    if name == "stick-breaking":
        return broken_stick(x)
    if name == "softmax":
        return softmax(x)
    if name == "ssmax":
        s = 0.43 if param is None else param
        return softmax([s * math.log(n) * (a - b) + b for a, b in zip(x, fall, strict=True)])
    if name == "softmax-reweighted":
        return reweight(softmax(x), exponent)
    if name == "softmax-inverse":
        return [-a for a in softmax(x)]
    if name in ("softmax-recentred", "softmax-recentred-l1"):
        a = softmax(x)
        if n > 3:
            a = [value - 1.0 / n for value in a]
        return l1(a) if name.endswith("-l1") else a
    if name == "sigmoid":
        return [sigmoid(value - math.log(big_l)) for value in x]
    if name.startswith("sigmoid-logn"):
        a = [sigmoid(value - math.log(n)) for value in x]
        if name == "sigmoid-logn":
            return a
        return l1(a) if name == "sigmoid-logn-l1" else reweight(l1(a), exponent)
    if name == "relu-length":
        return [max(value, 0.0) / big_l for value in x]
    if name == "relu-shen":
        gamma = 1.0 if param is None else param
        return [max(value, 0.0) / (gamma * math.sqrt(n / 2.0)) for value in x]
    if name in ("identity", "exp"):
        return [PHI[name](value) for value in x]
    phi = name.removesuffix("-l1")
    assert name != phi, f"the reference has no mechanism {name!r}"
    return l1([PHI[phi](value) for value in x])


def weights(name, q, k, *, window=None, sinks=0, decay=None, **settings):
    """All rows, zeros where a key is not seen; the last query stands at the last key.

    decay[j] is the log of what the step to key j leaves of everything before it.
    """
    lq, lk = len(q), len(k)
    rows = []
    for i in range(lq):
        end = lk - lq + i + 1
        seen = [j for j in range(end) if window is None or j >= end - window or j < sinks]
        falls = () if decay is None else [math.fsum(decay[j + 1 : end]) for j in seen]
        found = row(name, q[i], [k[j] for j in seen], falls=falls, **settings)
        rows.append([0.0] * lk)
        for j, weight in zip(seen, found, strict=True):
            rows[-1][j] = weight
    return rows


def weights_of_batch(name, q, k, params=None, decay=None, **settings):
    """`weights` of every head of tensors q (B, H, Lq, d), k (B, H, Lk, d), as a float64 tensor."""

    def head(b, h):
        scalar = None if params is None else params[h].item()
        falls = None if decay is None else decay[b, h].tolist()
        rows = q[b, h].tolist(), k[b, h].tolist()
        return weights(name, *rows, param=scalar, decay=falls, **settings)

    found = [[head(b, h) for h in range(q.shape[1])] for b in range(q.shape[0])]
    return torch.tensor(found, dtype=torch.float64)
