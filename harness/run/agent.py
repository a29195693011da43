"""torchrun's agent, which starts the ranks and looks after them, with words for what it does.

An agent is the part of torchrun that runs on every machine. torch's `SimpleElasticAgent` leaves to its subclasses how
ranks are started, stopped and looked at. These three methods are wrapped here; what they do stays torch's.
"""

import signal

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from harness.run.ending import NOT_AGAIN, killed_by


class Agent(LocalElasticAgent):
    """`say(text)` gets a line when a rank has failed. `started`: whether any ran on this machine; `running`: now."""

    say, started, running = staticmethod(print), False, False

    def _start_workers(self, worker_group):
        Agent.started = Agent.running = True
        return super()._start_workers(worker_group)

    def _stop_workers(self, *arguments, **options):
        super()._stop_workers(*arguments, **options)
        Agent.running = False

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and result.failures:
            allowed = worker_group.spec.max_restarts
            if any(failure.exitcode == NOT_AGAIN for failure in result.failures.values()):
                self._remaining_restarts = 0  # torch does the same for a rank that the system cannot end
            elif self._remaining_restarts:
                number = allowed - self._remaining_restarts + 1
                Agent.say(f"{what_failed(result.failures)}. Starting all ranks again, {number} of {allowed}")
            else:
                Agent.say(what_failed(result.failures))
        return result


def use(say) -> None:
    """From here on torchrun in this process has this agent."""
    Agent.say, Agent.started, Agent.running = staticmethod(say), False, False
    api.LocalElasticAgent = Agent


def what_failed(failures: dict) -> str:
    """In plain words what has ended the ranks, of torch's {rank: ProcessFailure}: the causes, not what followed."""
    ended = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    # A killed rank's neighbours lose it and fail; those that are left, torchrun ends by SIGTERM.
    killed = {rank: -code for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM}
    if killed:
        return "; ".join(f"rank {rank} was {_how(number)}" for rank, number in killed.items())
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    return f"rank {first} failed with exit code {ended[first]}, see above"


def _how(number: int) -> str:
    return "killed by signal 9 (out of memory? kill -9?)" if number == signal.SIGKILL else killed_by(number)
