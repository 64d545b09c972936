"""What an embedding matrix looks like as a whole: lengths, directions, rank, and rows that training never reached."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import numpy as np

from llmcli.matrix import Matrix, Side
from llmcli.names import Names
from llmcli.probe import Floats, Ids, Rows, share

ALIKE = 0.95
"""The cosine to a common direction from which rows count as alike."""
SHARED = 0.005
"""How far apart, relatively, norms may lie that count as one."""
_RANK_WORK = 4e10  # multiplications that the rank may cost before it is taken of a sample of the rows


class Histogram(msgspec.Struct, frozen=True):
    """How many values lie between one edge and the next; the last bin holds its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Norms(msgspec.Struct, frozen=True):
    """The lengths of the rows."""

    mean: float
    std: float
    min: float
    max: float
    histogram: Histogram


class Scale(msgspec.Struct, frozen=True):
    """The root mean square of a coordinate and the mean norm of a row, as stored and times the root of d.

    Gemma's models multiply by it (`by_model`): N(0, 0.02) rows of 2,048 then have an RMS of 0.905 and a norm of 41.
    """

    rms: float
    norm: float
    root: float
    rms_scaled: float
    norm_scaled: float
    by_model: bool


class Anisotropy(msgspec.Struct, frozen=True):
    """How far the rows point one way: the mean cosine of all pairs and its spread over sampled ones.

    `mean_norm` is the length of the mean row, by the mean length of a row: 0 when directions cancel, 1 when they agree.
    """

    mean_cosine: float
    std_cosine: float
    mean_cosine_centered: float
    std_cosine_centered: float
    mean_norm: float


class Rank(msgspec.Struct, frozen=True):
    """The effective rank: e to the entropy of the singular values by their sum (Roy and Vetterli, 2007, EUSIPCO).

    Of the rows as they are and of the centred ones; taken of `rows` rows, all of them or an even sample.
    """

    effective: float
    centered: float
    rows: int


class Alike(msgspec.Struct, frozen=True):
    """Rows that point the same way: all have at least the cosine `cosine` to their common direction."""

    cosine: float
    rows: int


class SharedNorm(msgspec.Struct, frozen=True):
    """The norm that most rows share: `rows` of them lie within `tolerance` (relative) from `norm` upwards."""

    norm: float
    tolerance: float
    rows: int


class UnderTrained(msgspec.Struct, frozen=True):
    """Rows that stand apart as never-updated ones do, by three signs, each None where it does not show.

    Where the output is tied or the matrix is the output's, tokens that never occur are all pushed the same way:
    `alike`. Rows that keep their initial values, or decay together, share one norm: `shared_norm`. Rows that decayed
    alone, or padding, are much shorter than the rest: `short`. (After Land and Bartolo, 2024, arXiv:2405.05417.)
    """

    rows: int
    ids: tuple[int, ...]
    alike: Alike | None
    shared_norm: SharedNorm | None
    short: int | None


class EmbeddingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix of token vectors (V, d). What is counted over rows is counted over usable ones that have a token.

    `duplicates` are groups of rows with the same numbers.
    """

    tensor: str
    matrix: Side
    dtype: str
    rows: int
    width: int
    tied: bool
    zero: tuple[int, ...]
    not_finite: tuple[int, ...]
    without_token: tuple[int, ...]
    norms: Norms
    scale: Scale
    anisotropy: Anisotropy
    rank: Rank
    duplicates: tuple[tuple[int, ...], ...]
    under_trained: UnderTrained


def report(
    matrix: Matrix, names: Names, progress: Callable[[float], None] = lambda amount: None
) -> tuple[EmbeddingReport, Floats]:
    """The report, and the norm of every row with a token (NaN for those that are not finite).

    `progress` hears of the shares of the work done, which add up to 1.
    """
    rows = Rows(matrix, names.count)
    survey = _Survey(rows)
    progress(0.4)
    usable = survey.usable
    norms = survey.norms[usable]
    centered = Rows(matrix, names.count, center=True)
    after = _Survey(centered)
    progress(0.3)
    before = rows.random_pairs()
    anisotropy = Anisotropy(
        mean_cosine=_pairs_mean(survey.unit_sum, len(usable)),
        std_cosine=before.std,
        mean_cosine_centered=_pairs_mean(after.unit_sum, len(after.usable)),
        std_cosine_centered=centered.random_pairs().std,
        mean_norm=float(np.linalg.norm(survey.total / max(len(usable), 1)) / max(norms.mean(), 1e-300))
        if len(usable)
        else 0.0,
    )
    rank = _rank(rows, usable, survey.total / max(len(usable), 1))
    progress(0.3)
    root = float(matrix.width**0.5)
    rms = float(np.sqrt(np.mean(norms**2) / matrix.width)) if len(usable) else 0.0
    mean = float(norms.mean()) if len(usable) else 0.0
    unnamed = [id for id in range(rows.count) if names.of(id) == f"<row {id}>"] if names.known else []
    finished = EmbeddingReport(
        tensor=matrix.info.name,
        matrix=matrix.side,
        dtype=matrix.info.dtype,
        rows=matrix.rows,
        width=matrix.width,
        tied=matrix.tied,
        zero=tuple(np.flatnonzero(survey.norms == 0).tolist()),
        not_finite=tuple(np.flatnonzero(~np.isfinite(survey.norms)).tolist()),
        without_token=(*unnamed, *range(rows.count, matrix.rows)),
        norms=Norms(mean, float(norms.std()) if len(usable) else 0.0, *_ends(norms), histogram(norms)),
        scale=Scale(rms, mean, root, rms * root, mean * root, matrix.scale != 1.0),
        anisotropy=anisotropy,
        rank=rank,
        duplicates=_duplicates(rows, survey),
        under_trained=_under_trained(rows, centered, survey),
    )
    return finished, np.where(np.isfinite(survey.norms), survey.norms, np.nan)


class _Survey:
    """One pass over all rows: their norms, their sum, the sum of their directions, and a fingerprint of each."""

    def __init__(self, rows: Rows) -> None:
        self.norms = np.zeros(rows.count)
        self.prints = np.zeros(rows.count)
        good = np.zeros(rows.count, bool)
        self.total = np.zeros(rows.matrix.width)
        self.unit_sum = np.zeros(rows.matrix.width)
        mark = np.random.default_rng(0).standard_normal(rows.matrix.width)
        lock = threading.Lock()

        def work(first: int, block: Floats) -> None:
            with np.errstate(all="ignore"):
                norms, usable = rows.usable(np.arange(first, first + len(block)), block)
                self.norms[first : first + len(block)] = norms
                self.prints[first : first + len(block)] = np.vecdot(block, mark)
                good[first : first + len(block)] = usable
                total, directions = block[usable].sum(0), (1 / norms[usable]) @ block[usable]
            with lock:
                self.total += total
                self.unit_sum += directions

        rows.each(work)
        self.usable: Ids = np.flatnonzero(good)


def _pairs_mean(unit_sum: Floats, count: int) -> float:
    """The mean cosine of all pairs of different rows, from the sum of their directions."""
    return float((unit_sum @ unit_sum - count) / (count * (count - 1))) if count > 1 else 0.0


def _rank(rows: Rows, usable: Ids, mean: Floats) -> Rank:
    width = rows.matrix.width
    most = max(4 * width, int(_RANK_WORK / width**2))
    chosen = usable if len(usable) <= most else usable[np.linspace(0, len(usable) - 1, most).astype(np.intp)]
    gram, total = np.zeros((width, width)), np.zeros(width)
    for start in range(0, len(chosen), 512):
        block = rows.vectors(chosen[start : start + 512]) - mean
        gram += block.T @ block
        total += block.sum(0)
    count = max(len(chosen), 1)
    # From the centred rows to the rows as they are: adding the mean back in exact arithmetic costs no pass.
    plain = gram + np.outer(mean, total) + np.outer(total, mean) + count * np.outer(mean, mean)
    grams = [plain, gram - np.outer(total, total) / count]
    ranks = [0.0, 0.0]

    def work(which: int) -> None:
        ranks[which] = effective_rank(grams[which])

    share(work, range(2))
    return Rank(ranks[0], ranks[1], len(chosen))


def effective_rank(gram: Floats) -> float:
    """e to the entropy of the singular values of a matrix by their sum, from its Gram matrix (d, d)."""
    values = np.linalg.eigvalsh(gram)
    singular = np.sqrt(np.clip(values, 0, None))
    singular = singular[singular > singular.max(initial=0) * 1e-7]  # what rounding makes of zero
    if not len(singular):
        return 0.0
    share_of = singular / singular.sum()
    return float(np.exp(-(share_of * np.log(share_of)).sum()))


def _duplicates(rows: Rows, survey: _Survey) -> tuple[tuple[int, ...], ...]:
    """Groups of usable rows with the same numbers: those of one fingerprint, compared."""
    order = survey.usable[np.lexsort((survey.usable, survey.prints[survey.usable], survey.norms[survey.usable]))]
    same = (np.diff(survey.norms[order]) == 0) & (np.diff(survey.prints[order]) == 0)
    groups: list[list[int]] = []
    for place in np.flatnonzero(same):
        a, b = int(order[place]), int(order[place + 1])
        pair = rows.vectors([a, b])
        if np.array_equal(pair[0], pair[1]):
            if groups and groups[-1][-1] == a:
                groups[-1].append(b)
            else:
                groups.append([a, b])
    return tuple(sorted(tuple(group) for group in groups))


def _under_trained(rows: Rows, centered: Rows, survey: _Survey) -> UnderTrained:
    usable, norms = survey.usable, survey.norms[survey.usable]
    found: set[int] = set()
    shared, same = shared_norm(norms)
    if shared:
        found.update(usable[same].tolist())
    alike = None
    if len(usable) > 2:
        cosines = _common_direction(rows, usable, norms, np.union1d(usable[same][:256], _crowds(centered, usable)))
        close = cosines >= ALIKE
        below = cosines < ALIKE - 0.15
        between = len(usable) - int(close.sum()) - int(below.sum())
        # A crowd apart from the others, not the dense end, or the bulk, of one that thins out.
        if close.sum() >= 3 and between * 4 <= min(close.sum(), below.sum()):
            alike = Alike(float(cosines[close].min()), int(close.sum()))
            found.update(usable[close].tolist())
    few = short_rows(norms)
    found.update(usable[few].tolist())
    ids = sorted(found | set(np.flatnonzero(survey.norms == 0).tolist()))
    return UnderTrained(len(ids), tuple(ids), alike, shared, len(few) or None)


def shared_norm(norms: Floats) -> tuple[SharedNorm | None, Ids]:
    """The densest group of norms that lie within `SHARED` of each other, and its places; None where it is no crowd.

    A crowd is at least eight rows, and well over three times what so narrow a window holds at the top of a normal
    distribution as wide as the middle 98 % of the norms (well over: by five standard deviations of chance).
    """
    order = np.argsort(norms, kind="stable")
    values = norms[order]
    if not len(values):
        return None, np.empty(0, np.intp)
    counts = np.searchsorted(values, values * (1 + SHARED), side="right") - np.arange(len(values))
    first = int(counts.argmax())
    members = np.sort(order[first : first + counts[first]])
    logs = np.log(values)
    width = max(float(np.clip(logs, *np.quantile(logs, [0.01, 0.99])).std()), 1e-9)
    expected = len(values) * min(1.0, SHARED / (width * (2 * np.pi) ** 0.5))
    if len(members) < 8 + 3 * expected + 5 * expected**0.5:
        return None, members
    return SharedNorm(float(values[first]), SHARED, len(members)), members


def short_rows(norms: Floats) -> Ids:
    """The places of norms far below the rest: those of a crowd of their own below the others' (`valley`), and any
    under half the median and apart by over six robust deviations (of the logarithms, from the median)."""
    if len(norms) < 8:
        return np.empty(0, np.intp)
    logs = np.log(norms)
    middle = np.median(logs)
    deviation = 1.4826 * np.median(np.abs(logs - middle))
    return np.flatnonzero(logs < max(min(middle - np.log(2), middle - 6 * deviation), valley(logs)))


def valley(logs: Floats) -> float:
    """Where logarithms of norms fall into two crowds, the place of the widest gap between them; else -infinity.

    They are divided where the two parts' means lie farthest apart for their sizes (Otsu, 1979). Two crowds they are if
    the lower is the smaller, the upper's median is half as much again, and of the way between the medians the middle
    third holds at most an eighth of what the lower part holds: one crowd cut in two is fullest there.
    """
    values = np.sort(logs)
    below = np.arange(1, len(values))
    sums = np.cumsum(values)
    apart = (sums[-1] - sums[:-1]) / (len(values) - below) - sums[:-1] / below
    count = int((below * (len(values) - below) * apart**2).argmax()) + 1
    low, high = float(np.median(values[:count])), float(np.median(values[count:]))
    third = (high - low) / 3
    between = values[(values > low + third) & (values < high - third)]
    if 2 * count >= len(values) or high - low < np.log(1.5) or 8 * len(between) > count:
        return -np.inf
    edges = np.concatenate([[low + third], between, [high - third]])
    widest = int(np.diff(edges).argmax())
    return float(edges[widest : widest + 2].mean())


def _crowds(centered: Rows, usable: Ids) -> Ids:
    """Some rows from where most of them point: those of the fullest of the cells into which ten random planes cut
    space. Rows that point the same way lie in one cell, others anywhere."""
    planes = np.random.default_rng(1).standard_normal((10, centered.matrix.width))
    planes /= np.linalg.norm(planes, axis=1, keepdims=True)
    cells = (2 ** np.arange(10)) @ (centered.products(planes)[:, usable] > 0)
    fullest = np.bincount(cells, minlength=1024).argsort(kind="stable")[::-1][:3]
    return np.concatenate([usable[cells == cell][:256] for cell in fullest])


def _common_direction(rows: Rows, usable: Ids, norms: Floats, start: Ids) -> Floats:
    """The cosine of every usable row to a direction that many share.

    Found among the rows `start`: the one of them that has most others close by, then the middle of what lies near.
    """
    some = rows.vectors(start)
    some = some / np.linalg.norm(some, axis=1, keepdims=True)
    direction = some[int((some @ some.T >= ALIKE).sum(1).argmax())]
    for _ in range(2):
        close = usable[rows.products(direction[None])[0, usable] >= ALIKE * norms][:1024]
        if not len(close):
            break
        block = rows.vectors(close)
        middle = (block / np.linalg.norm(block, axis=1, keepdims=True)).sum(0)
        direction = middle / np.linalg.norm(middle)
    cosines: Floats = rows.products(direction[None])[0, usable] / norms
    return cosines


def histogram(values: Floats, bins: int = 20) -> Histogram:
    """Values in bins of one width between their ends."""
    if not len(values):
        return Histogram((0.0, 1.0), (0,))
    low, high = _ends(values)
    if high - low <= 1e-9 * abs(high):
        low, high = low * 0.99, high * 1.01
    counts, edges = np.histogram(values, bins, (low, high))
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def _ends(values: Floats) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
