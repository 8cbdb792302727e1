package gateway

import (
	"math"
	"time"
)

// service counts the cost that each class was served with in the last ten seconds, in buckets of a
// second. Seconds are those since its first use: the system's clock may be set back.
type service struct {
	buckets [10][classCount]float64
	sums    [classCount]float64
	begun   time.Time // second 0; zero: it was not used yet
	at      int64     // second of the newest bucket
	since   time.Time // when the first call of the window began; zero: there was none
}

func (s *service) second(now time.Time) int64 { return int64(now.Sub(s.begun) / time.Second) }

func (s *service) advance(now time.Time) {
	if s.begun.IsZero() {
		s.begun = now
	}
	second := s.second(now)
	if second-s.at >= int64(len(s.buckets)) {
		*s = service{begun: s.begun, at: second}
		return
	}
	if s.at == second {
		return
	}
	for s.at < second {
		s.at++
		s.buckets[s.at%int64(len(s.buckets))] = [classCount]float64{}
	}
	// Summed anew: what additions and subtractions leave of nothing would look like service.
	s.sums = [classCount]float64{}
	for _, bucket := range s.buckets {
		for c, cost := range bucket {
			s.sums[c] += cost
		}
	}
}

func (s *service) add(now time.Time, c RequestClass, cost float64) {
	s.advance(now)
	if s.since.IsZero() {
		s.since = now
	}
	s.buckets[s.at%int64(len(s.buckets))][c] += cost
	s.sums[c] += cost
}

// correct takes in the true cost of a call of which the estimate was added when it began. What was estimated too
// much is taken back where it was added, as long as the window has that second: elsewhere it would take back the
// service of other calls. What was estimated too little is service of now.
func (s *service) correct(now, began time.Time, c RequestClass, estimate, cost float64) {
	if cost >= estimate {
		s.add(now, c, cost-estimate)
		return
	}
	s.advance(now)
	second, oldest := s.second(began), s.at-int64(len(s.buckets))+1
	if second < max(oldest, 0) || second > s.at {
		return
	}
	s.buckets[second%int64(len(s.buckets))][c] += cost - estimate
	s.sums[c] += cost - estimate
}

// slots is how many slots a class had in the mean of the window, as far as it is known.
func (s *service) slots(now time.Time, c RequestClass) float64 {
	covers := time.Duration(len(s.buckets)-1)*time.Second + now.Sub(s.begun)%time.Second
	covers = min(covers, max(now.Sub(s.since), serviceLeast))
	return s.sums[c] / milliseconds(covers)
}

// serviceLeast is the least time over which service is averaged: calls are counted whole when they begin.
const serviceLeast = time.Second

// lead is how much more than its floor a class was served within the window: the service of all classes, in
// milliseconds, until its share is the floor if it gets none.
func (s *service) lead(c RequestClass, floor float64) float64 {
	var total float64
	for _, sum := range s.sums {
		total += sum
	}
	if floor <= 0 {
		return math.Inf(1)
	}
	return max(0, s.sums[c]/floor-total)
}

// share is the part of a class of all service; 1 while there was none.
func (s *service) share(c RequestClass) float64 {
	var total float64
	for _, sum := range s.sums {
		total += sum
	}
	if total <= 0 {
		return 1
	}
	return s.sums[c] / total
}
