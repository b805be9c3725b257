"""The paper's attention mechanisms one number at a time, in Python's float64.

Written from the paper's formulas alone: no tensor operation, no mask, no rescaling, no code shared
with the library. Slow and literal on purpose. Of a mechanism only its parts are read, so that a new
entry of known parts needs no change here. `weights(mechanism, q, k)` takes a name or a `Mechanism`
and the nested lists of one head, q (Lq, d) and k (Lk, d), and returns the rows of the attention
matrix.
"""

import math

import torch

from lssar.mechanisms import MECHANISMS


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
    """Return l1(relu(N A - 1[N > 3])^p); a row with nothing above its mean stays as it was."""
    n = len(row)
    y = [max(n * a - (1.0 if n > 3 else 0.0), 0.0) for a in row]
    return l1([value**p for value in y]) if max(y) > 0 else row


def broken_stick(x):
    """Break off sigmoid(x) from the query's own key backwards; the own key has the rest."""
    left, row = 1.0, [0.0] * len(x)
    for j in reversed(range(len(x) - 1)):
        row[j] = left * sigmoid(x[j])
        left *= 1.0 - sigmoid(x[j])
    return [*row[:-1], left]


def adaptive_p(p, alpha, n, train_length):
    return p if n <= train_length else p * (1.0 + alpha * (math.sqrt(n / train_length) - 1.0))


def score(m, q, key, n, train_length, param):
    """Return scale * similarity of one query and one key, for a row that sees n keys."""
    d = len(q)
    log_n = math.log(n)
    scales = {
        "1/sqrt(d)": 1.0 / math.sqrt(d),
        "s log N / sqrt(d)": (param or 0.0) * log_n / math.sqrt(d),
        "log d log N": math.log(d) * log_n,
        "s log d log N": (param or 0.0) * math.log(d) * log_n,
        "log d log L": math.log(d) * math.log(train_length),
        "sqrt(d)": math.sqrt(d),
    }
    of_products = m.scale in ("1/sqrt(d)", "s log N / sqrt(d)")
    x = scales[m.scale] * (dot(q, key) if of_products else cosine(q, key))
    return x if m.softcap is None else m.softcap * math.tanh(x / m.softcap)


def row(
    mechanism, q, keys, *, p=None, alpha=0.0, train_length=1024, length=None, param=None, falls=()
):
    """Return the weights of query vector q on the keys that it sees (itself included).

    The mechanism's parts say which formula, and nothing else of it is used. p is the mechanism's
    own when absent; length is the paper's L (train_length when absent); param the learnable scalar
    of the head; falls what is added to each score for the way from its key to the query.
    """
    m = MECHANISMS[mechanism] if isinstance(mechanism, str) else mechanism
    n = len(keys)
    big_l = train_length if length is None else length
    param = m.parameter_init if param is None else param
    biases = {"none": 0.0, "-log L": -math.log(big_l), "-log N": -math.log(n)}
    x = [score(m, q, key, n, train_length, param) + biases[m.bias] for key in keys]
    x = [a + b for a, b in zip(x, falls or [0.0] * n, strict=True)]

    if m.norm == "stick":
        return broken_stick(x)
    if m.norm == "l1":
        a = softmax(x) if m.phi == "exp" else l1([PHI[m.phi](value) for value in x])
    else:
        divisors = {"none": 1.0, "L": big_l, "gamma sqrt(N/2)": (param or 1) * math.sqrt(n / 2.0)}
        a = [PHI[m.phi](value) / divisors[m.norm] for value in x]

    if m.post == "negate":
        a = [-value for value in a]
    elif m.post != "none":
        assert m.post in ("recentre", "recentre, l1"), m.post
        a = [value - (1.0 / n if n > 3 else 0.0) for value in a]
        a = l1(a) if m.post == "recentre, l1" else a
    if m.p is None:
        return a
    return reweight(a, adaptive_p(m.p if p is None else p, alpha, n, train_length))


def weights(mechanism, q, k, *, window=None, sinks=0, decay=None, **settings):
    """Return all rows, zeros where a key is not seen; the last query stands at the last key.

    decay[j] is the log of what the step to key j leaves of everything before it.
    """
    lq, lk = len(q), len(k)
    rows = []
    for i in range(lq):
        end = lk - lq + i + 1
        seen = [j for j in range(end) if window is None or j >= end - window or j < sinks]
        falls = () if decay is None else [math.fsum(decay[j + 1 : end]) for j in seen]
        found = row(mechanism, q[i], [k[j] for j in seen], falls=falls, **settings)
        rows.append([0.0] * lk)
        for j, weight in zip(seen, found, strict=True):
            rows[-1][j] = weight
    return rows


def weights_of_batch(mechanism, q, k, params=None, decay=None, **settings):
    """Return `weights` of every head of tensors q (B, H, Lq, d), k (B, H, Lk, d), in float64."""

    def head(b, h):
        scalar = None if params is None else params[h].item()
        falls = None if decay is None else decay[b, h].tolist()
        rows = q[b, h].tolist(), k[b, h].tolist()
        return weights(mechanism, *rows, param=scalar, decay=falls, **settings)

    found = [[head(b, h) for h in range(q.shape[1])] for b in range(q.shape[0])]
    return torch.tensor(found, dtype=torch.float64)
