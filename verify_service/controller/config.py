"""All numbers of the controller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Says how the controller weighs evidence, time and risk.

    Attributes:
        prior_chance: Chance of a first guess of a draft model before anything was seen: optimistic, so that it is tried at once.
        prior_match: The same of n-grams per step of match length; six steps make 0.84, as logs of texts show.
        prior_repeat: Chance of a further guess of n-grams: what repeats goes on repeating.
        prior_worth: Tokens that asking for n-grams brings before anything was seen: more than asking costs on two cores.
        prior_draft: Plain steps that a draft's level takes before one was seen: a head on a GPU or a fast CPU.
        pool_outcomes: Outcomes that a prior weighs: a few real ones outvote it.
        pool_memory: Outcomes of all sequences that an estimate rests on: noise of 4 % against change in a second.
        own_outcomes: Outcomes that what all sequences showed weighs in the estimate of one.
        own_memory: Outcomes of one sequence that its estimate rests on: texts change within some 100 tokens.
        forget_seconds: Seconds in which two thirds of all evidence are forgotten: what did not pay is tried again.
        seen_enough: Outcomes below which a score is raised by one standard deviation, to find out.
        margin: Factor by which another choice must be better: less is noise.
        bank_steps: Plain steps, of as many sequences as there are, that exploration may lose at once.
        bank_share: Share of all time that is added to the bank: what finding out may cost in the long run.
        resume_steps: Wrong drafted steps that an emptied bank must hold before anything is drafted again; the same of probes.
        check_share: Share of drafting's time for plain steps that show what these take now.
        read_share: Time of a token that a draft reads, of a row of the target: a draft has about a seventh of its work.
        switch_steps: Plain steps that a change between drafting and not takes where steps run ahead, before one was seen.
        payback_steps: Steps at most in which a change, or a draft's reading, must have paid.
        relative_memory: Steps from which a kind's own slowness is told: a median of 31 resists a few hiccups.
    """

    prior_chance: float = 0.7
    prior_match: float = 0.14
    prior_repeat: float = 0.85
    prior_worth: float = 0.6
    prior_draft: float = 0.08
    pool_outcomes: float = 4.0
    pool_memory: float = 128.0
    own_outcomes: float = 4.0
    own_memory: float = 48.0
    forget_seconds: float = 4.0
    seen_enough: float = 32.0
    margin: float = 1.03
    bank_steps: float = 5.0
    bank_share: float = 0.01
    resume_steps: float = 1.0
    check_share: float = 0.005
    read_share: float = 0.15
    switch_steps: float = 4.0
    payback_steps: float = 64.0
    relative_memory: int = 31


DEFAULT = ControllerConfig()
