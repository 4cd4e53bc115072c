"""The product as functions, under one name: `from tuner.api import plan, deploy, place, ...`.

    plan, write                    whatever a spec asks for; its folder with launch files
    plan_training, write_plan      the same of a training run, for those who know the goal
    deploy, write_serve_plan       of a deployment
    place, write_place_plan        of a placement of experts
    explain, what_ifs, what_if     why a plan is what it is; what it would be under other limits
    compare                        what differs between plans of one goal, and which is better
    estimate, estimate_serving     what the launch of today does
    backtest, backtest_serving     predictions beside measured runs
    verify, verify_place           launches that let the measurement decide
    verify_serve                   the same of deployments
    report, rendered               a page about a plan, and its text
    check                          stored profiles and accepted plans, planned again
    read_any_plan                  a plan from its folder, whatever its goal

Paths may be strings, one profile may stand for a list of one, and a plan is named by its folder or
by the `plan.json` in it. The commands call these same functions. `examples/api.py` has an example
of each that plans, explains or estimates, and a test executes it. What measures a machine is in
`profilers.session`.
"""

from tuner.backtest_api import backtest as backtest
from tuner.backtest_api import backtest_serving as backtest_serving
from tuner.compare.comparison import compare as compare
from tuner.estimate_api import estimate as estimate
from tuner.estimate_api import estimate_serving as estimate_serving
from tuner.explain.explanation import explain as explain
from tuner.explain.other_limits import what_if as what_if
from tuner.explain.other_limits import what_ifs as what_ifs
from tuner.explain.planned_spec import read_any_plan as read_any_plan
from tuner.place_api import Placed as Placed
from tuner.place_api import place as place
from tuner.place_api import verify_place as verify_place
from tuner.place_folder import write_place_plan as write_place_plan
from tuner.plan_api import AnyPlanned as AnyPlanned
from tuner.plan_api import plan as plan
from tuner.plan_api import write as write
from tuner.plan_folder import write_plan as write_plan
from tuner.regress.check import check as check
from tuner.report.written import rendered as rendered
from tuner.report_api import report as report
from tuner.serve_api import Deployed as Deployed
from tuner.serve_api import deploy as deploy
from tuner.serve_folder import write_serve_plan as write_serve_plan
from tuner.train_api import Planned as Planned
from tuner.train_api import measured_profile as measured_profile
from tuner.train_api import plan_training as plan_training
from tuner.train_api import refuse_unpriced as refuse_unpriced
from tuner.train_api import version as version
from tuner.train_api import wanted_cases as wanted_cases
from tuner.verify_api import command_trials as command_trials
from tuner.verify_api import machine_of as machine_of
from tuner.verify_api import slurm_trials as slurm_trials
from tuner.verify_api import verify as verify
from tuner.verify_api import work_of as work_of
from tuner.verify_serve_api import deployment_trials as deployment_trials
from tuner.verify_serve_api import verify_serve as verify_serve
from tuner.what_if import parse_changes as parse_changes
