"""The product as functions, under one name: `from tuner.api import plan, deploy, place, ...`.

    plan, write                    plan any spec; write the plan folder with launch files
    plan_training, write_plan      the same for a training run
    deploy, write_serve_plan       the same for a deployment
    place, write_place_plan        the same for an expert placement
    explain, what_ifs, what_if     why a plan was chosen; the plan under other limits
    compare                        differences between plans of one goal, and which is better
    estimate, estimate_serving,    price an existing launch
    estimate_rl
    backtest, backtest_serving,    compare predictions with measured runs
    backtest_rl
    verify, verify_place           launch candidates and choose by measurement
    verify_serve                   the same for deployments
    report, rendered               a report on a plan, and its text
    check                          plan stored scenarios again and compare
    read_any_plan, read_verified   read a plan of any goal, or its trials, from its folder
    read_profile                   read a stored profile
    permute_checkpoint, read_permutation   renumber experts, as an emitted apply.py does

Tables are pandas' data frames: `plan.candidates()`, `verified.trials()`, `profile.table("gemm")`,
`compare(...).table()`, `backtest(...).rows()`; a backtest takes its runs from a data frame, too.

Paths may be strings, a single profile needs no list, and a plan is named by its folder or by the
`plan.json` in it. The commands import these functions where they are defined, as all of them
together take a second. `examples/api.py` has an example of each that plans, explains or estimates;
a test runs it. Machines are measured by `profilers.session`.
"""

from profilers.store import read_profile as read_profile
from tuner.backtest.tables import backtest as backtest
from tuner.backtest.tables import backtest_rl as backtest_rl
from tuner.backtest.tables import backtest_serving as backtest_serving
from tuner.engines.megatron_lm.checkpoint import permute_checkpoint as permute_checkpoint
from tuner.engines.megatron_lm.checkpoint import read_permutation as read_permutation
from tuner.explain.comparison import compare as compare
from tuner.explain.explanation import explain as explain
from tuner.explain.other_limits import what_if as what_if
from tuner.explain.other_limits import what_ifs as what_ifs
from tuner.explain.report import report as report
from tuner.goals.estimate import estimate as estimate
from tuner.goals.estimate import estimate_rl as estimate_rl
from tuner.goals.estimate import estimate_serving as estimate_serving
from tuner.goals.place_folder import write_place_plan as write_place_plan
from tuner.goals.place_plan import Placed as Placed
from tuner.goals.place_plan import place as place
from tuner.goals.place_plan import verify_place as verify_place
from tuner.goals.plan import AnyPlanned as AnyPlanned
from tuner.goals.plan import plan as plan
from tuner.goals.plan import wanted_sizes as wanted_sizes
from tuner.goals.plan import write as write
from tuner.goals.profiles import machine_of as machine_of
from tuner.goals.registry import read_any_plan as read_any_plan
from tuner.goals.registry import read_verified as read_verified
from tuner.goals.serve_folder import write_serve_plan as write_serve_plan
from tuner.goals.serve_plan import Deployed as Deployed
from tuner.goals.serve_plan import deploy as deploy
from tuner.goals.serve_planned import neighbours as neighbours
from tuner.goals.train_folder import write_plan as write_plan
from tuner.goals.train_plan import Planned as Planned
from tuner.goals.train_plan import measured_profile as measured_profile
from tuner.goals.train_plan import plan_training as plan_training
from tuner.goals.train_plan import refuse_unpriced as refuse_unpriced
from tuner.goals.train_plan import version as version
from tuner.goals.verify import command_trials as command_trials
from tuner.goals.verify import deployment_trials as deployment_trials
from tuner.goals.verify import slurm_trials as slurm_trials
from tuner.goals.verify import verify as verify
from tuner.goals.verify import verify_serve as verify_serve
from tuner.plans.what_if import parse_changes as parse_changes
from tuner.regress.check import check as check
from tuner.report.written import rendered as rendered
from tuner.verify.space import work_of as work_of
