"""From frame-wise log-probabilities to symbols, by best path or beam search, and their error rates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.speech.vocabulary import BLANK, decode

_NEVER = float("-inf")


class Hypotheses(NamedTuple):
    """One hypothesis an utterance: ``ids`` int64 [n, longest], padded with the blank after ``lengths`` [n] symbols.

    ``scores`` [n] are natural logarithms of probabilities: of the one path for best-path decoding, of all the paths
    that the search kept for a prefix.
    """

    ids: Tensor
    lengths: Tensor
    scores: Tensor

    def texts(self) -> list[str]:
        return texts(self.ids, self.lengths)


def texts(ids: Tensor, lengths: Tensor) -> list[str]:
    """Return the text of each row of ``ids`` [n, longest], of which the first ``lengths`` [n] symbols count."""
    return [decode(row[:length]) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def decode_greedy(log_probs: Tensor, lengths: Tensor) -> Hypotheses:
    """Take the most probable symbol of each frame; drop repeats, then blanks (Graves 2006, best path decoding).

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
    """Return which frames belong to their utterance: [n, frames]."""
    return torch.arange(log_probs.shape[1], device=log_probs.device) < lengths.to(log_probs.device)[:, None]


class _Beams(NamedTuple):
    """Prefixes under search, [n, width] each.

    ``blank`` and ``symbol`` are log-probabilities of all paths so far that give the prefix and end in a blank or in its
    last symbol. ``key`` and ``parent`` are hashes of the prefix, and of it without its last symbol.
    """

    last: Tensor
    key: Tensor
    parent: Tensor
    blank: Tensor
    symbol: Tensor

    def score(self) -> Tensor:
        return torch.logaddexp(self.blank, self.symbol)


def decode_beam(log_probs: Tensor, lengths: Tensor, width: int = 16) -> Hypotheses:
    """Return the most probable text, by a search over prefixes that adds up all paths to the same one.

    After Hannun et al. 2014, "First-Pass Large Vocabulary Continuous Speech Recognition using Bi-Directional
    Recurrent DNNs", algorithm 1, without a language model. Exact when ``width``, the prefixes kept after each frame, is
    at least the number of prefixes. ``log_probs``: [n, frames, symbols], of which ``lengths`` [n] frames count.
    """
    log_probs = log_probs.double()  # a sum over very many paths keeps its digits
    places = torch.arange(width, device=log_probs.device).expand(len(log_probs), width)
    never = log_probs.new_full(places.shape, _NEVER)
    nobody = _nobody(width, log_probs.device).expand(places.shape)
    # The empty prefix with probability 1, and places that no prefix has taken yet.
    empty = never.where(places > 0, 0)
    last = torch.full_like(places, BLANK)
    beams = _Beams(last=last, key=nobody, parent=nobody, blank=empty, symbol=never)
    steps = []
    for frame, inside in enumerate(_inside(log_probs, lengths).unbind(dim=1)):
        after, source, grown = _advance(beams, log_probs[:, frame])
        inside = inside[:, None]
        beams = _Beams(*(torch.where(inside, new, old) for new, old in zip(after, beams, strict=True)))
        steps.append((torch.where(inside, source, places), torch.where(inside, grown, BLANK)))
    best = beams.score().argmax(dim=1, keepdim=True)
    scores = beams.score().gather(1, best)
    path = []
    for source, grown in reversed(steps):
        path.append(grown.gather(1, best))
        best = source.gather(1, best)
    text = torch.cat(path[::-1], dim=1)
    return Hypotheses(*_pack(text, text != BLANK), scores[:, 0])


def _nobody(width: int, device: torch.device) -> Tensor:
    """Make hashes, one a place, for places without a prefix: equal to no other."""
    return -1 - torch.arange(width, device=device)


def _advance(beams: _Beams, log_probs: Tensor) -> tuple[_Beams, Tensor, Tensor]:
    """Advance the beams by a frame of ``log_probs`` [n, symbols]; return also their sources and added symbols."""
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
    is_prefix = beams.key[:, :, None] == beams.parent[:, None, :]
    grown_to = beams.last[:, None, :].expand(rows, width, width)
    joining = torch.where(is_prefix, grow.gather(2, grown_to), _NEVER)
    stay_symbol = torch.logaddexp(stay_symbol, joining.logsumexp(dim=1))
    taken = torch.zeros(grow.shape, dtype=torch.int64, device=grow.device).scatter_add_(2, grown_to, is_prefix.long())
    grow = grow.masked_fill(taken > 0, _NEVER)

    candidates = torch.cat([torch.logaddexp(stay_blank, stay_symbol), grow.reshape(rows, -1)], dim=1)
    value, choice = candidates.topk(width, dim=1)
    stays = choice < width
    source = torch.where(stays, choice, (choice - width) // symbols)
    grown = torch.where(stays, BLANK, (choice - width) % symbols)
    key = beams.key.gather(1, source)
    # A hash of 64 bits by which prefixes are distinguished (multiplier and increment of Knuth's MMIX generator).
    mixed = ((key ^ (key >> 29)) + grown + 1) * 6364136223846793005 + 1442695040888963407
    # A candidate without any probability must not be taken for a prefix later.
    nobody = _nobody(width, value.device)
    real = value > _NEVER
    after = _Beams(
        last=torch.where(stays, beams.last.gather(1, source), grown),
        key=torch.where(real, torch.where(stays, key, mixed), nobody),
        parent=torch.where(real, torch.where(stays, beams.parent.gather(1, source), key), nobody),
        blank=torch.where(stays, stay_blank.gather(1, source), _NEVER),
        symbol=torch.where(stays, stay_symbol.gather(1, source), value),
    )
    return after, source, grown


class ErrorRates:
    """``wer`` of words, which are what stands between spaces; ``cer`` of symbols, spaces between words included.

    Each is (substitutions + deletions + insertions) / reference units, summed before dividing (Morris et al. 2004).
    The best alignment of each utterance is jiwer's. A rate is above 1 when most of the predicted units are wrong.
    """

    def __init__(self) -> None:
        #: Errors and reference units of each rate.
        self._sums = {name: torch.zeros(2, dtype=torch.int64) for name in ("wer", "cer")}

    def update(self, ids: Tensor, lengths: Tensor, reference_ids: Tensor, reference_lengths: Tensor) -> None:
        """Take a row per utterance: symbols predicted [n, longest] and spoken [n, longest'], and their numbers [n]."""
        import jiwer

        references = texts(reference_ids, reference_lengths)
        hypotheses = texts(ids, lengths)
        alignments: dict[str, Any] = {
            "wer": jiwer.process_words(references, hypotheses),
            "cer": jiwer.process_characters(references, hypotheses),
        }
        for name, alignment in alignments.items():
            wrong = alignment.substitutions + alignment.deletions
            self._sums[name] += torch.tensor([wrong + alignment.insertions, wrong + alignment.hits])

    def compute(self) -> dict[str, Tensor]:
        """Return shares, not per cent; NaN before the first reference."""
        return {name: errors / units for name, (errors, units) in self._sums.items()}
