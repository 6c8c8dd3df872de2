"""Stop requests in this very process: handlers, order, nesting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from lockstep.launch.process.signals import CommandInterrupt, StopRequest, accept, exit_code, held_back


def test_the_first_signal_is_remembered() -> None:
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == signal.SIGTERM


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_a_closed_terminal_is_a_stop_unless_nohup_ignores_it(before: signal.Handlers) -> None:
    outside = signal.signal(signal.SIGHUP, before)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested == (None if before == signal.SIG_IGN else signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, outside)


def test_a_second_interrupt_interrupts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == signal.SIGINT


def test_after_the_interrupt_further_ones_are_ignored_also_around_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CommandInterrupt() as command:
        with pytest.raises(KeyboardInterrupt), StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        with StopRequest():
            os.kill(os.getpid(), signal.SIGINT)
        command.ignore()
        os.kill(os.getpid(), signal.SIGINT)
    with CommandInterrupt(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None], ids=["default", "ignored", "own"])
def test_the_caller_gets_its_handlers_back(before: signal.Handlers) -> None:
    outside = signal.signal(signal.SIGTERM, before)
    try:
        with StopRequest() as stop:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a library takes it
            stop.install()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, outside)


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError), StopRequest():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_installs_nothing_and_can_still_ask() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT))
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, signal.SIGTERM]


def test_nested_requests_share_what_they_hear() -> None:
    with StopRequest() as outer:
        with StopRequest() as inner:
            os.kill(os.getpid(), signal.SIGINT)
            assert (inner.requested, outer.requested) == (signal.SIGINT, None)
        assert outer.requested == signal.SIGINT
        with StopRequest() as late:
            assert late.requested == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)


def test_the_callback_hears_once() -> None:
    early: list[int] = []
    late: list[int] = []
    with StopRequest() as stop:
        stop.notify(early.append)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        stop.notify(late.append)
    assert (early, late) == ([signal.SIGTERM], [signal.SIGINT])


def test_held_back_signals_arrive_later() -> None:
    with StopRequest() as stop:
        with held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert stop.requested is None
        assert stop.requested == signal.SIGTERM


def test_accept_lets_held_back_signals_through() -> None:
    with StopRequest() as stop, held_back():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        accept()
        assert stop.requested == signal.SIGTERM


def test_exit_codes() -> None:
    assert (exit_code(signal.SIGINT), exit_code(signal.SIGTERM)) == (130, 143)


def test_what_is_forked_meanwhile_ends_at_sigterm() -> None:
    """As ``multiprocessing.Pool`` ends its workers, and then waits for them."""
    with StopRequest() as stop:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(20)
        ended = child.exitcode
        child.kill()
        child.join()
    assert ended == -signal.SIGTERM
    assert stop.requested is None
