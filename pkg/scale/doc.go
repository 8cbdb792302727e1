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
// replicate.go, hpa.go and utilization.go have the algorithms of others in place of base to zero.
// spread.go divides a number among the deployments of a model, and a budget among models;
// victims.go names the instances to be removed, by what usage.go reads about their calls. simulate plays all of
// them against traces.
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
