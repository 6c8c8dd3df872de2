"""From frame-wise log-probabilities to symbols, by best path or a beam search with an n-gram, and their error rates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError, RunFolderError
from lockstep.recipes.speech.manifest import read_rows
from lockstep.recipes.speech.vocabulary import BLANK, ENGLISH, Vocabulary
from lockstep.rundir.files import read_bytes

#: Symbols of the longest n-gram: the next one and a history of five.
ORDER = 6
#: The first history that is counted: of nothing but the beginning.
START = 1
#: A table row for each history takes memory: about 1 GB for a text of this size.
MAX_BYTES = 16 << 20

_NEVER = float("-inf")


class Hypotheses(NamedTuple):
    """One hypothesis an utterance: ``ids`` int64 [n, longest], padded with the blank after ``lengths`` [n] symbols.

    ``scores`` [n] are natural logarithms of probabilities: of the one path for best-path decoding, of all the paths
    that the search kept for a prefix.
    """

    ids: Tensor
    lengths: Tensor
    scores: Tensor

    def texts(self, vocabulary: Vocabulary = ENGLISH) -> list[str]:
        return texts(self.ids, self.lengths, vocabulary)


def texts(ids: Tensor, lengths: Tensor, vocabulary: Vocabulary = ENGLISH) -> list[str]:
    """The text of each row of ``ids`` [n, longest], of which the first ``lengths`` [n] symbols count."""
    return [vocabulary.decode(row[:length]) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def decode_greedy(log_probs: Tensor, lengths: Tensor) -> Hypotheses:
    """The most probable symbol of each frame, repeats and then blanks taken out (Graves 2006, best path decoding).

    ``log_probs``: [n, frames, symbols], of which ``lengths`` [n] frames count.
    """
    best, path = log_probs.max(dim=2)
    inside = _inside(log_probs, lengths)
    changed = torch.ones_like(inside)
    changed[:, 1:] = path[:, 1:] != path[:, :-1]
    ids, counts = _pack(path, inside & changed & (path != BLANK))
    return Hypotheses(ids, counts, torch.where(inside, best, 0).sum(dim=1))


def _pack(path: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Move the ``selected`` symbols of each row of ``path`` [n, frames] to its front; also returns their counts [n]."""
    counts = selected.sum(dim=1)
    order = torch.sort(~selected, dim=1, stable=True).indices[:, : int(counts.max())]
    return torch.where(selected, path, BLANK).gather(1, order), counts


def _inside(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Which frames belong to their utterance: [n, frames]."""
    return torch.arange(log_probs.shape[1], device=log_probs.device) < lengths.to(log_probs.device)[:, None]


class Ngram(NamedTuple):
    """An n-gram of symbols: an automaton whose states are histories; :data:`START` is that before the first symbol.

    ``scores`` float64 [states, symbols] are added to the score of a text by each next symbol, the blank's by the end
    of the text; ``following`` int64 [states, symbols] are the states after each symbol.
    """

    scores: Tensor
    following: Tensor

    def weighted(self, weight: float, bonus: float) -> Ngram:
        """Of log-probabilities, the scores ``weight`` · log-probability + ``bonus``: longer texts would else lose."""
        return Ngram(weight * self.scores + bonus, self.following)


def count(texts: Iterable[Sequence[int]], symbols: int, order: int = ORDER) -> Ngram:
    """Natural log-probabilities by Witten and Bell's interpolation (Chen and Goodman 1998, section 2.5).

    A history h that occurs N times before T different symbols has P(c|h) = (n(hc) + T P(c|h')) / (N + T), where h' is h
    without its oldest symbol; below the shortest, empty one, all symbols are equally probable.

    ``symbols`` is the size of the vocabulary, ``order`` at least 2. The blank marks both ends of a text.
    """
    stream = np.array([BLANK, *itertools.chain.from_iterable((*ids, BLANK) for ids in texts if len(ids))])
    places = np.arange(1, len(stream))  # of the symbols that have a history of the length in question
    states = np.zeros(len(stream), dtype=np.int64)  # of the history before each place
    probabilities = _interpolated(states[places], stream[places], np.full((1, symbols), 1 / symbols))
    following = np.zeros((1, symbols), dtype=np.int64)
    for length in range(1, order):
        # A history is one of a symbol less, at the place before, and the symbol there. None reaches over a text's end.
        if length > 1:
            places = np.intersect1d(places, places + 1)
            places = places[stream[places - 1] != BLANK]
        keys = states[places - 1] * symbols + stream[places - 1]
        histories, first, row = np.unique(keys, return_index=True, return_inverse=True)
        suffixes = states[places[first]]
        known_states = len(following)
        following.reshape(-1)[histories] = known_states + np.arange(len(histories))
        following = np.concatenate([following, following[suffixes]])
        probabilities = np.concatenate([probabilities, _interpolated(row, stream[places], probabilities[suffixes])])
        states[places] = known_states + row
    return Ngram(torch.from_numpy(np.log(probabilities)), torch.from_numpy(following))


def _interpolated(rows: np.ndarray, symbols: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """P [histories, symbols]: symbol ``seen[i]`` follows history ``rows[i]``; ``shorter`` are those of h'."""
    counts = np.zeros(shorter.shape)
    np.add.at(counts, (rows, symbols), 1)
    kinds = np.count_nonzero(counts, axis=1)[:, None]
    probabilities: np.ndarray = (counts + kinds * shorter) / (counts.sum(axis=1)[:, None] + kinds)
    return probabilities


def read_texts(path: Path, vocabulary: Vocabulary) -> list[list[int]]:
    """The symbols of each line of a text, or of each transcript of a manifest (``.jsonl``), to be counted.

    Symbols outside the vocabulary separate words. Raises :class:`DataError`: a file too large, or without any.
    """
    try:
        lines = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except RunFolderError as error:
        raise DataError(f"cannot read the text {path}", why=error.what, fix="check task.lm_text") from None
    if path.suffix == ".jsonl":
        lines = [row.text for row in read_rows(path)]
    encoded = []
    for line in lines:
        text = vocabulary.normalise(line)
        text = text.translate({ord(symbol): " " for symbol in vocabulary.unknown(text)})
        if words := text.split():
            encoded.append(vocabulary.encode(" ".join(words)))
    if not encoded:
        raise DataError(
            f"{path} has no words to count", why="no line has a letter of task.alphabet", fix="check task.lm_text"
        )
    return encoded


class _Beams(NamedTuple):
    """Prefixes under search, [n, width] each.

    ``blank`` and ``symbol`` are log-probabilities of all paths so far that give the prefix and end in a blank or in its
    last symbol. ``key`` and ``parent`` are hashes of the prefix, and of it without its last symbol. ``state`` is the
    n-gram's after the prefix, ``prior`` its part of the score.
    """

    last: Tensor
    key: Tensor
    parent: Tensor
    blank: Tensor
    symbol: Tensor
    state: Tensor
    prior: Tensor

    def score(self) -> Tensor:
        return torch.logaddexp(self.blank, self.symbol)


def decode_beam(log_probs: Tensor, lengths: Tensor, width: int = 16, ngram: Ngram | None = None) -> Hypotheses:
    """The most probable text, by a search over prefixes that adds up all paths to the same one.

    After Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional
    Recurrent DNNs", algorithm 1, with an n-gram of symbols in place of one of words. Exact when ``width``, the prefixes
    kept after each frame, is at least the number of prefixes. ``log_probs``: [n, frames, symbols], of which ``lengths``
    [n] frames count. What ``ngram`` adds counts in the search, not in :attr:`Hypotheses.scores`.
    """
    # In 64 bits a sum over very many paths keeps its digits.
    log_probs, symbols = log_probs.double(), log_probs.shape[2]
    if ngram is None:  # one that adds 0 to the score of any text
        ngram = Ngram(log_probs.new_zeros(START + 1, symbols), torch.full((START + 1, symbols), START))
    ngram = Ngram(*(table.to(log_probs.device) for table in ngram))
    places = torch.arange(width, device=log_probs.device).expand(len(log_probs), width)
    never = log_probs.new_full(places.shape, _NEVER)
    nobody = _nobody(width, log_probs.device).expand(places.shape)
    # The empty prefix with probability 1, and places that no prefix has taken yet.
    empty = never.where(places > 0, 0)
    last = torch.full_like(places, BLANK)
    start = torch.full_like(places, START)
    beams = _Beams(last, nobody, nobody, empty, never, start, torch.zeros_like(never))
    steps = []
    for frame, inside in enumerate(_inside(log_probs, lengths).unbind(dim=1)):
        after, source, grown = _advance(beams, log_probs[:, frame], ngram)
        inside = inside[:, None]
        beams = _Beams(*(torch.where(inside, new, old) for new, old in zip(after, beams, strict=True)))
        steps.append((torch.where(inside, source, places), torch.where(inside, grown, BLANK)))
    ended = beams.score() + beams.prior + ngram.scores[beams.state, BLANK]
    best = ended.argmax(dim=1, keepdim=True)
    scores = beams.score().gather(1, best)
    path = []
    for source, grown in reversed(steps):
        path.append(grown.gather(1, best))
        best = source.gather(1, best)
    text = torch.cat(path[::-1], dim=1)
    return Hypotheses(*_pack(text, text != BLANK), scores[:, 0])


def _nobody(width: int, device: torch.device) -> Tensor:
    """Hashes, one a place, for places without a prefix: equal to no other."""
    return -1 - torch.arange(width, device=device)


def _advance(beams: _Beams, log_probs: Tensor, ngram: Ngram) -> tuple[_Beams, Tensor, Tensor]:
    """The beams after a frame of ``log_probs`` [n, symbols], where each comes from, and by which symbol it grew."""
    rows, symbols = log_probs.shape
    width = beams.key.shape[1]
    score = beams.score()
    # A prefix stays unchanged by a blank, or by its last symbol said on.
    stay_blank = score + log_probs[:, BLANK, None]
    stay_symbol = beams.symbol + log_probs.gather(1, beams.last)
    # It grows by any symbol; by its last one only after a blank.
    grow = score[:, :, None] + log_probs[:, None, :]
    again = (beams.blank + log_probs.gather(1, beams.last))[:, :, None]
    grow = grow.scatter(2, beams.last[:, :, None], again)
    grow[:, :, BLANK] = _NEVER
    # Where prefix i grown by a symbol is prefix j of the beam, its paths are added to j's: [n, i, j].
    same = beams.key[:, :, None] == beams.parent[:, None, :]
    grown_to = beams.last[:, None, :].expand(rows, width, width)
    joining = torch.where(same, grow.gather(2, grown_to), _NEVER)
    stay_symbol = torch.logaddexp(stay_symbol, joining.logsumexp(dim=1))
    taken = torch.zeros(grow.shape, dtype=torch.int64, device=grow.device).scatter_add_(2, grown_to, same.long())
    grow = grow.masked_fill(taken > 0, _NEVER)

    candidates = torch.cat([torch.logaddexp(stay_blank, stay_symbol), grow.reshape(rows, -1)], dim=1)
    priors = torch.cat([beams.prior, (beams.prior[:, :, None] + ngram.scores[beams.state]).reshape(rows, -1)], dim=1)
    choice = (candidates + priors).topk(width, dim=1).indices
    value = candidates.gather(1, choice)
    stays = choice < width
    source = torch.where(stays, choice, (choice - width) // symbols)
    grown = torch.where(stays, BLANK, (choice - width) % symbols)
    key = beams.key.gather(1, source)
    state = beams.state.gather(1, source)
    # A hash of 64 bits by which prefixes are distinguished (multiplier and increment of Knuth's MMIX generator).
    mixed = ((key ^ (key >> 29)) + grown + 1) * 6364136223846793005 + 1442695040888963407
    # A candidate without any probability must not be taken for a prefix later.
    nobody = _nobody(width, value.device)
    real = value > _NEVER
    after = _Beams(
        torch.where(stays, beams.last.gather(1, source), grown),
        torch.where(real, torch.where(stays, key, mixed), nobody),
        torch.where(real, torch.where(stays, beams.parent.gather(1, source), key), nobody),
        torch.where(stays, stay_blank.gather(1, source), _NEVER),
        torch.where(stays, stay_symbol.gather(1, source), value),
        torch.where(stays, state, ngram.following[state, grown]),
        priors.gather(1, choice),
    )
    return after, source, grown


class ErrorRates:
    """``wer`` of words, which are what stands between spaces; ``cer`` of symbols, spaces between words included.

    Each is (substitutions + deletions + insertions) / reference units, summed before dividing (Morris et al. 2004).
    The best alignment of each utterance is jiwer's. A rate is above 1 when most of the predicted units are wrong.
    """

    def __init__(self, vocabulary: Vocabulary = ENGLISH) -> None:
        self._vocabulary = vocabulary
        #: Errors and reference units of each rate.
        self._sums = {name: torch.zeros(2, dtype=torch.int64) for name in ("wer", "cer")}

    def update(self, ids: Tensor, lengths: Tensor, reference_ids: Tensor, reference_lengths: Tensor) -> None:
        """Take a row per utterance: symbols predicted [n, longest] and spoken [n, longest'], and their numbers [n]."""
        import jiwer

        references, hypotheses = (
            texts(*row, self._vocabulary) for row in ((reference_ids, reference_lengths), (ids, lengths))
        )
        alignments: dict[str, Any] = {
            "wer": jiwer.process_words(references, hypotheses),
            "cer": jiwer.process_characters(references, hypotheses),
        }
        for name, alignment in alignments.items():
            wrong = alignment.substitutions + alignment.deletions
            self._sums[name] += torch.tensor([wrong + alignment.insertions, wrong + alignment.hits])

    def compute(self) -> dict[str, Tensor]:
        """Shares, not per cent; NaN before the first reference."""
        return {name: errors / units for name, (errors, units) in self._sums.items()}
