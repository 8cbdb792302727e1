// Package governor answers one question for a task node: may it take more?
//
// The answer is arithmetic over readings (verdict.go); the readings come from
// the cgroup files and the machine (cgroup.go, machine.go) and are taken by a
// loop of their own (Run), so that a claim never waits for a file.
//
//	sample ──> gates ──┐
//	                   ├──> Decide ──> Verdict{Allow, Reasons}
//	declared needs ────┘
//
// Three resources are judged.
//
//   - Processing threads: an entry takes one, or as many as its queue declares.
//   - Memory. Running out of it kills every entry of the node, so two rules hold.
//     Declared needs are packed up to the low mark only; and when the measured use
//     passes the high mark a gate closes for all queues, and opens again after the
//     use has stayed under the low mark for Config.Calm. What lies between the
//     marks is headroom for entries that outgrow what their queue declared.
//   - CPU. It is shared rather than used up: too much of it slows entries down and
//     breaks none. The declared cores of running entries never exceed the cores of
//     the node. The gate looks at what declarations do not explain, because a node
//     that is busy with exactly the work it took is doing its job. By default the
//     gate refuses only queues that declare a CPU need: a queue that declares none
//     says that its entries wait for somebody else, and refusing those would idle a
//     node whose own throughput keeps it busy.
//
// A reading is up to half a second old, and what was taken since is not in it.
// So the use of a resource is estimated by dead reckoning: what was measured
// beyond the needs declared at that moment, plus the needs declared now. An entry
// that finishes makes room at once, one that starts takes room at once, and no
// claim can spend the same free memory twice.
package governor
