// Package scale decides how many instances a model has, and why.
//
// # Words
//
//	instance     an inference worker of a model, with a number of slots
//	deployment   a kind of instances of a model that one backend starts and stops: a target, a policy, a cost
//	base         the least number of instances that would have kept waits short, had there been as many all along
//	level        a number of instances, as a candidate for the answer
//	shadow queue the queue that a level would have; its service knows no cold starts
//	surge        the number that the present backlog needs; it is given up half a cold start after the backlog
//	hold         the time for which a level is kept after the base fell below it
//	stuck        of a start: not ready after max(3 x p95 of cold starts, 10 min)
//	blocked      of a deployment: three of its starts in a row failed or were stuck; it starts nothing for a while,
//	             then one instance at a time
//	rival        an algorithm of another system, for comparison
//
// # The decision
//
// Decide is pure. Its steps, each of which may note a reason:
//
//	switches, modes, overrides   bounds.go
//	age of the sources           decide.go
//	stuck starts                 stuck.go
//	base                         shadow.go
//	surge                        surge.go
//	hold, the last instance      hold.go
//	rates                        rates.go
//	what runs, zero              zero.go
//	bounds, modes again          bounds.go
//
// replicate.go, hpa.go and utilization.go have the algorithms of others in place of base to zero. What Decide takes and
// returns is in policy.go (the settings of a deployment, with its minimums by schedule in floor.go; policyread.go reads
// those that are stored), obs.go (the observation, the state and the decision; sane.go bounds their times and numbers)
// and explain.go (the reasons and their sentences). simulate plays all of them against traces.
//
// # The duty
//
// The duty of the elected leader has two loops. One decides: a pass reads rows, calls Decide for each model and stores
// what changed. The other one applies: a round compares the numbers that were stored with what the backends have. They
// share nothing but rows, and wake each other, so that a backend that hangs delays no decision.
//
//	 tick, or a push or request for a model without instances (wake.go)
//	   |
//	   v                          a pass
//	run.go, pass.go -> ondemand.go -> deployment.go, input.go -> Decide -> divide.go -> budget.go -> store.go
//	   ^                                                                                             |
//	   | first report of a backend             tick, numbers that changed, or a backend that watches |
//	   |                                                                                             v
//	record.go <-- plan.go <-- usage.go <-- backend.List <------------------ deployment.go <------ apply.go
//	   |                          a round of one deployment
//	   `--> backend.Apply
//
//	run.go         the duty: when a pass is made, for which models, and the figures of the newest one
//	pass.go        a pass over some models: reads their rows, decides for each, and keeps the figures
//	wake.go        models that are decided before the next tick, and how often that may be
//	ondemand.go    makes the deployment of a model whose first request came, and removes those that are idle
//	input.go       the row of a model, and what it says has come and run since the decision before
//	deployment.go  the row of a deployment, what it tells about its backend, and the policy of all those of a model
//	divide.go      divides the number of a model among its deployments
//	budget.go      lowers the numbers of all deployments to a budget
//	store.go       writes decisions, states, minutes and the numbers of deployments, in one transaction of the term
//	fleet.go       the instances that are paid for, for metrics
//	applied.go     a deployment whose number is applied: its row, and what a round knows of it besides
//	apply.go       the rounds: when they are due, and what one does
//	notes.go       what the applier knows of a deployment besides its row: its round, and how its last orders went
//	backend.go     the interface of what starts and stops instances; the implementations are in pkg/scale/backend
//	usage.go       what nodes and gateways report about the calls of instances
//	members.go     pure: the instances that are registered, or exist, or both
//	plan.go        pure: compares their number with the one that was decided, and says what to do
//	leave.go       pure: the instances that drain or hang and are to leave
//	victims.go     pure: the instances whose removal costs least
//	adopt.go       instances of a backend that ran before, that are registered by others, and that were lost
//	refused.go     when instances are tried again that could not be registered
//	hearing.go     when an instance that was not heard for its time to live is given up
//	record.go      writes what a round found, the instances that it registers, drains and forgets, and its order
//	answer.go      writes how the backend answered: the order was carried out, failed, or found no room
//
// An order is written before the backend gets it, and confirmed afterwards. A new leader thus knows which starts may be
// under way, and gives an order again that was not confirmed.
//
// # The base
//
// For each level l the state has the work W in slot-seconds that would wait had there been l instances all
// along. A tick adds what arrived times the mean service time, and takes away what the level can do:
//
//	c = l n rho / (1 + beta / sqrt(l n))      n slots an instance
//	W = max(0, W + arrived x service - c dt)  at most what the level works off in the drain time
//	w = max(0, W - phi l n service) / c       seconds
//
// The base is the least level with w <= theta x SLO. It is lowered to the least level with which no more than
// the tolerated share of the requests of the hold time would have waited for longer than the SLO, so that one
// peak does not hold its level. These waits are those of a second queue, whose capacity is l n rho: the reserve of a
// small fleet guards against the error of a fluid, and here a request counts as late from SLO - 4 service / sqrt(l n)
// on for the same reason. A backlog that a cold start caused is not in W: it is no demand.
package scale
