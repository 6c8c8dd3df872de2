"""From frame-wise log-probabilities to symbols, by best path or a beam search, both in batch; and their error rates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.tasks.speech.ngram import START, Ngram, indifferent
from lockstep.tasks.speech.vocabulary import BLANK, ENGLISH, Vocabulary

#: Multiplier and increment of Knuth's MMIX generator: prefixes are distinguished by a hash of 64 bits.
_MULTIPLY, _ADD = 6364136223846793005, 1442695040888963407
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

    Args:
        log_probs: [n, frames, symbols]; what stands after an utterance's end has no influence.
        lengths: frames of each utterance [n].
    """
    best, path = log_probs.max(dim=2)
    inside = _inside(log_probs, lengths)
    changed = torch.ones_like(inside)
    changed[:, 1:] = path[:, 1:] != path[:, :-1]
    ids, found = _pack(path, inside & changed & (path != BLANK))
    return Hypotheses(ids, found, torch.where(inside, best, 0).sum(dim=1))


def _pack(path: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """What is ``kept`` of each row of ``path`` [n, frames], moved to its front, and how much that is."""
    found = kept.sum(dim=1)
    order = torch.sort(~kept, dim=1, stable=True).indices[:, : int(found.max())]
    return torch.where(kept, path, BLANK).gather(1, order), found


def _inside(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Which frames belong to their utterance: [n, frames]."""
    return torch.arange(log_probs.shape[1], device=log_probs.device) < lengths.to(log_probs.device)[:, None]


class _Beams(NamedTuple):
    """Prefixes under search, [n, width] each.

    ``blank`` and ``symbol`` are log-probabilities of all paths so far that give the prefix and end in a blank or in its
    last symbol. ``key`` and ``parent`` are hashes of the prefix, and of it without its last symbol. ``state`` is the
    n-gram's after the prefix, ``prior`` what it has added to the score.
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
    Recurrent DNNs", algorithm 1, with an n-gram of symbols in place of one of words. Exact when ``width`` is at least
    the number of prefixes.

    Args:
        log_probs: [n, frames, symbols]; what stands after an utterance's end has no influence.
        lengths: frames of each utterance [n].
        width: prefixes kept after each frame.
        ngram: what it adds to the score of a prefix counts in the search, not in :attr:`Hypotheses.scores`.
    """
    ngram = indifferent(log_probs.shape[2]) if ngram is None else ngram
    ngram = ngram.to(log_probs.device)
    # In 64 bits a sum over very many paths keeps its digits.
    log_probs = log_probs.double()
    beams = _start(log_probs, width)
    places = torch.arange(width, device=log_probs.device).expand(len(log_probs), width)
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
    symbols = torch.cat(path[::-1], dim=1)
    return Hypotheses(*_pack(symbols, symbols != BLANK), scores[:, 0])


def _start(log_probs: Tensor, width: int) -> _Beams:
    """The empty prefix with probability 1, and places that no prefix has taken yet."""
    never = log_probs.new_full((len(log_probs), width), _NEVER)
    blank = never.clone()
    blank[:, 0] = 0
    nobody = _nobody(width, log_probs.device).expand(never.shape)
    start = torch.full_like(nobody, START)
    return _Beams(torch.full_like(nobody, BLANK), nobody, nobody, blank, never, start, torch.zeros_like(never))


def _nobody(width: int, device: torch.device) -> Tensor:
    """Hashes, one a place, for places without a prefix: equal to no other."""
    return -1 - torch.arange(width, device=device)


def _advance(beams: _Beams, log_probs: Tensor, ngram: Ngram) -> tuple[_Beams, Tensor, Tensor]:
    """One more frame, whose log-probabilities are [n, symbols].

    Returns:
        The beams after it; from which place each of them comes, and by which symbol it grew there (the blank: by none).
    """
    rows, symbols = log_probs.shape
    width = beams.key.shape[1]
    score = beams.score()
    # A prefix stays what it is by a blank, or by its last symbol said on.
    stay_blank = score + log_probs[:, BLANK, None]
    stay_symbol = beams.symbol + log_probs.gather(1, beams.last)
    # It grows by any symbol; by its own last one only after a blank.
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
    key, state = beams.key.gather(1, source), beams.state.gather(1, source)
    # A candidate without any probability must not be taken for a prefix later.
    nobody, real = _nobody(width, value.device), value > _NEVER
    after = _Beams(
        torch.where(stays, beams.last.gather(1, source), grown),
        torch.where(real, torch.where(stays, key, _hash(key, grown)), nobody),
        torch.where(real, torch.where(stays, beams.parent.gather(1, source), key), nobody),
        torch.where(stays, stay_blank.gather(1, source), _NEVER),
        torch.where(stays, stay_symbol.gather(1, source), value),
        torch.where(stays, state, ngram.following[state, grown]),
        priors.gather(1, choice),
    )
    return after, source, grown


def _hash(key: Tensor, symbol: Tensor) -> Tensor:
    """Of a prefix grown by ``symbol``: a different number for each, but for an accident of about 1 in 2^64."""
    mixed = (key ^ (key >> 29)) + symbol + 1
    return mixed * _MULTIPLY + _ADD


class ErrorRates:
    """``wer`` of words, which are what stands between spaces; ``cer`` of symbols, spaces between words included.

    Each is (substitutions + deletions + insertions) / reference units, summed before dividing (Morris et al. 2004).
    The best alignment of each utterance is jiwer's. A rate is above 1 when most of what is heard is not there.
    """

    def __init__(self, vocabulary: Vocabulary = ENGLISH) -> None:
        self._vocabulary = vocabulary
        #: Errors and reference units of each rate.
        self._sums = {name: torch.zeros(2, dtype=torch.int64) for name in ("wer", "cer")}

    def update(self, ids: Tensor, lengths: Tensor, reference_ids: Tensor, reference_lengths: Tensor) -> None:
        """Take a row per utterance: symbols predicted [n, longest] and spoken [n, longest'], and their numbers [n]."""
        import jiwer

        said, heard = (texts(*row, self._vocabulary) for row in ((reference_ids, reference_lengths), (ids, lengths)))
        self._add("wer", jiwer.process_words(said, heard))
        self._add("cer", jiwer.process_characters(said, heard))

    def _add(self, name: str, found: Any) -> None:
        wrong = found.substitutions + found.deletions
        self._sums[name] += torch.tensor([wrong + found.insertions, wrong + found.hits])

    def compute(self) -> dict[str, Tensor]:
        """Shares, not per cent; NaN before the first reference."""
        return {name: errors / units for name, (errors, units) in self._sums.items()}
