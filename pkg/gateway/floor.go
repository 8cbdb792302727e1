package gateway

import (
	"math"
	"time"
)

// service counts the cost that each criticality was served with of late, in ten buckets of time. A call is counted
// whole when it begins, and a bucket lasts for as long as two calls take to begin where that is more than a second: the
// window has 20 calls or more, so that a share of a twentieth can be told from none.
type service struct {
	buckets [10]bucket
	sums    [criticalityCount]float64
	at      int64         // number of the newest bucket
	width   time.Duration // of the newest bucket, see serviceWidth; bucketLeast if it is less
	since   time.Time     // when the first call of the window began; zero: there was none
}

type bucket struct {
	begun time.Time // zero: it was not used yet
	cost  [criticalityCount]float64
}

// bucketLeast is the least width of a bucket.
const bucketLeast = time.Second

func (s *service) bucket(number int64) *bucket { return &s.buckets[number%int64(len(s.buckets))] }

// advance begins the buckets that are due. Times are compared by differences: the system's clock may be set back.
func (s *service) advance(now time.Time) {
	begun, width := s.bucket(s.at).begun, max(s.width, bucketLeast)
	if begun.IsZero() {
		begun = now
		s.bucket(s.at).begun = now
	}
	due := int64(now.Sub(begun) / width)
	if due <= 0 {
		return
	}
	if due >= int64(len(s.buckets)) {
		*s = service{at: s.at + due, width: s.width}
		s.bucket(s.at).begun = begun.Add(time.Duration(due) * width)
		return
	}
	for range due {
		s.at++
		begun = begun.Add(width)
		*s.bucket(s.at) = bucket{begun: begun}
	}
	// Summed anew: what additions and subtractions leave of nothing would look like service.
	s.sums = [criticalityCount]float64{}
	for _, b := range s.buckets {
		for c, cost := range b.cost {
			s.sums[c] += cost
		}
	}
}

// add counts the cost of a call that begins, and returns the number of its bucket.
func (s *service) add(now time.Time, c Criticality, cost float64) int64 {
	s.advance(now)
	if s.since.IsZero() {
		s.since = now
	}
	s.bucket(s.at).cost[c] += cost
	s.sums[c] += cost
	return s.at
}

// correct takes in the true cost of a call of which the estimate was added to the bucket of that number. What was
// estimated too much is taken back there, as long as the window has that bucket: elsewhere it would take back the
// service of other calls. What was estimated too little is service of now.
func (s *service) correct(now time.Time, number int64, c Criticality, estimate, cost float64) {
	if cost >= estimate {
		s.add(now, c, cost-estimate)
		return
	}
	s.advance(now)
	if s.at-number >= int64(len(s.buckets)) {
		return
	}
	s.bucket(number).cost[c] += cost - estimate
	s.sums[c] += cost - estimate
}

// slots is how many slots a criticality had in the mean of the window, as far as it is known.
func (s *service) slots(now time.Time, c Criticality) float64 {
	covers := max(now.Sub(s.since), s.width, bucketLeast) // no less: calls are counted whole when they begin
	if oldest := s.bucket(s.at + 1).begun; !oldest.IsZero() {
		covers = min(covers, now.Sub(oldest))
	}
	return s.sums[c] / milliseconds(covers)
}

// lead is how much more than its floor a criticality was served within the window: the service of all criticalities, in
// milliseconds, until its share is the floor if it gets none.
func (s *service) lead(c Criticality, floor float64) float64 {
	var total float64
	for _, sum := range s.sums {
		total += sum
	}
	if floor <= 0 {
		return math.Inf(1)
	}
	return max(0, s.sums[c]/floor-total)
}

// share is the part of a criticality of all service; 1 while there was none.
func (s *service) share(c Criticality) float64 {
	var total float64
	for _, sum := range s.sums {
		total += sum
	}
	if total <= 0 {
		return 1
	}
	return s.sums[c] / total
}

// serviceWidth is the width of the buckets of the service: as long as two calls take to begin, in the mean, while all
// slots are busy. bucketLeast if that is less.
func (p *Pool) serviceWidth() time.Duration {
	ms := 2 * p.cost.ms / float64(max(p.ceiling(), 1))
	return max(time.Duration(ms*float64(time.Millisecond)), bucketLeast)
}
