// Package governor decides whether a task node may take more entries (admission by threads, memory
// and CPU).
//
// The answer is arithmetic over readings (admission.go); the readings come from
// the cgroup files and the machine (cgroup.go, machine.go) and are taken by a
// loop of their own (Run), so that a claim never waits for a file.
//
//	sample ──> gates ──┐
//	                   ├──> Decide ──> Verdict{Allow, Reasons}
//	declared needs ────┘
//
// Three resources count.
//
//   - Processing threads: an entry takes one, or as many as its queue declares.
//   - Memory. Running out of it kills every entry of the node, so there are two rules.
//     The sum of declared needs stays under the low mark; and when the measured use
//     passes the high mark a gate closes for all queues, and opens again after the
//     use has stayed under the low mark for Config.Calm. The range between the
//     marks is headroom for entries that use more than their queue declared.
//   - CPU. It is shared rather than used up: overload slows entries down and
//     fails none. The declared cores of running entries never exceed the cores of
//     the node. The gate compares only the use beyond the declared needs, because a
//     node that is busy with its own declared entries is not overloaded. By default
//     the gate refuses only queues that declare a CPU need: entries of the others are
//     taken to wait for other systems, and refusing them would idle a node that is
//     busy with its own throughput.
//
// A reading is up to half a second old and does not include later entries.
// So the use of a resource is estimated: the measured use beyond the needs
// declared at that moment, plus the needs declared now. An entry that finishes
// frees its need at once, one that starts takes it at once, and no two claims
// can take the same free memory.
//
// The garbage of the Go runtime is kept below the same limit, in every program (runtime.go).
package governor
