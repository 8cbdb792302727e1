package invalidation

import "sync/atomic"

// groupBytes is what the payloads under one lock may have together, by the sizes of those before them: so what a node
// holds depends on its number of threads, and not on quantum_count times payload_limit. The locks of a claim in which
// payloads are much larger than before may have more.
const groupBytes = 4 << 20

// payloadSize estimates the size of the next payloads that a claim of groups reads (bytes); 0: none was read yet. It
// follows a larger mean of a group at once, and a smaller one by a quarter of the difference with each claim.
type payloadSize struct{ estimate atomic.Int64 }

// read takes in the groups of a claim.
func (s *payloadSize) read(groups []*Lock) {
	var mean int64
	for _, l := range groups {
		if n := len(l.Entries); n > 0 {
			sum := 0
			for i := range l.Entries {
				sum += len(l.Entries[i].Payload)
			}
			mean = max(mean, 1, int64(sum/n))
		}
	}
	if mean == 0 {
		return // no entries
	}
	if before := s.estimate.Load(); mean < before {
		mean = before - (before-mean+3)/4
	}
	s.estimate.Store(mean)
}

// quantum is how many entries of a key the next lock may cover: quantum_count, or as many as are likely to have
// groupBytes. Until payloads were read, each counts as the largest that the queue takes, so that a node that follows
// one which ran out of memory does not claim the same again.
func (q *Queue) quantum() int {
	size := int(q.sizes.estimate.Load())
	if size == 0 {
		size = q.Config.PayloadLimit
	}
	return max(1, min(q.Config.QuantumCount, groupBytes/size))
}
