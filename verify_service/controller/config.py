"""The numbers of the controller's policy that were tuned; fixed fractions stand where they are
used.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Weights of evidence, time and risk in the controller's choices.

    Attributes:
        prior_chance: Prior chance that a first guess is right, and prior tokens that asking for
            n-grams brings: optimistic, so that drafts are tried at once.
        prior_match: Prior chance of n-grams per step of match length: six steps make 0.84, as logs
            of texts show.
        prior_repeat: Prior chance of a further guess of n-grams: repetitions tend to continue.
        prior_draft: Prior time of a draft's level, in plain steps: a head on a GPU or a fast CPU.
        prior_outcomes: Weight of a prior, in outcomes: a few real ones outvote it. It has more
            uses, since 20 fields are the limit, so do not tune it for one alone. As many outcomes
            of a step count where a change is looked for; of as many comparisons of steps, half the
            median is believed; of a single text, half as many first steps show little. A full bank
            lets drafting begin at a rate that is 1 + 1 / prior_outcomes times lower, and on a CPU
            known drafts have at least such an advantage where plain steps fall due. While drafts
            rest on a GPU, one plain step of as many is learnt from; waits for drafts on a GPU are
            forgotten as many times more slowly.
        pool_memory: Number of outcomes behind an estimate for all sequences, and of steps between
            changes: noise of 4 % against change in a second.
        own_memory: Number of outcomes behind an estimate for one sequence: texts change within some
            100 tokens.
        near_steps: Number of newest steps that show the present: half of them may be hiccups.
        forget_seconds: Seconds in which two thirds of all evidence are forgotten, so that drafting
            that did not pay is tried again.
        surprise: Number of standard deviations at which outcomes count as a change: chance does
            this once in 10,000 steps.
        margin: Another choice must be better by this factor: less is noise.
        sure: Number of standard deviations added to estimates where drafting must surely pay:
            negative, so that drafts are rated worse than they seem.
        bank_steps: Capacity of the bank, in plain steps of the current batch: what trials may lose
            at once.
        bank_share: Share of all time that is added to the bank: what trials may cost in the long
            run.
        read_share: Time in which a draft reads a token, as a share of a row of the target: a draft
            has about a seventh of its work.
        close_tokens: Number of tokens that a draft reads at no cost: about what a few steps commit.
        switch_steps: Prior time of a switch to drafting where steps overlap, in plain steps.
        payback_steps: Maximum number of steps in which a switch, or a draft's reading, must pay.
        busy_share: Share of plain steps with prompts from which a suspended draft is not synced:
            syncs would slow these steps.
        tried_sequences: Number of sequences of a trial beside steps.
    """

    prior_chance: float = 0.7
    prior_match: float = 0.14
    prior_repeat: float = 0.85
    prior_draft: float = 0.08
    prior_outcomes: float = 4.0
    pool_memory: float = 128.0
    own_memory: float = 48.0
    near_steps: int = 9
    forget_seconds: float = 4.0
    surprise: float = 4.0
    margin: float = 1.03
    sure: float = -0.5
    bank_steps: float = 4.5
    bank_share: float = 0.01
    read_share: float = 0.15
    close_tokens: int = 32
    switch_steps: float = 4.0
    payback_steps: float = 512.0
    busy_share: float = 1 / 16
    tried_sequences: int = 16

    @property
    def own_prior(self) -> float:
        """Weight of all sequences' outcomes in the estimate for one on a CPU, for proposals without
        confidence: texts begin with tokens that are hard to guess.
        """
        return 3 * self.own_memory / 8

    @property
    def seen_enough(self) -> float:
        """Number of observations from which optimism ends, and maximum weight of a step's: a fourth
        of all that count.
        """
        return self.pool_memory / 4

    @property
    def newest_share(self) -> float:
        """Weight of the newest value in a running mean over about `near_steps` values."""
        return 2 / (self.near_steps + 1)

    @property
    def look_seconds(self) -> float:
        """Seconds for which a plan lasts: 1 % of the time for which evidence lasts."""
        return self.forget_seconds / 100


DEFAULT = ControllerConfig()
