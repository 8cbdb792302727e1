package gateway

// costModel estimates how long a call keeps its slot, in slot-milliseconds, from the calls before it:
// an exponentially weighted mean of slot time and, once workers have reported their tokens, the mean
// time for a token and the mean number of tokens generated.
type costModel struct {
	calls    int
	ms       float64 // slot time of a call
	metered  int     // calls with known tokens
	perToken float64 // ms, over input and output
	out      float64 // tokens generated
}

const (
	costWeight  = 0.1  // of the newest call in the means
	costInitial = 1000 // ms, before anything is known
	costMin     = 0.01 // ms: free calls would not move the virtual time
)

// observe takes in a call that ended. tokensIn and tokensOut are 0 where the worker did not say.
func (m *costModel) observe(ms, tokensIn, tokensOut float64) {
	m.calls++
	m.ms = mean(m.ms, ms, m.calls)
	if total := tokensIn + tokensOut; total > 0 {
		m.metered++
		m.perToken = mean(m.perToken, ms/total, m.metered)
		m.out = mean(m.out, tokensOut, m.metered)
	}
}

// estimate returns the cost to expect of a request with so many input tokens, which may generate at
// most outMax (0: not bounded); ok is false before the first call.
func (m *costModel) estimate(tokensIn, outMax float64) (ms float64, ok bool) {
	switch {
	case m.calls == 0:
		return 0, false
	case m.metered == 0 || tokensIn == 0:
		return max(m.ms, costMin), true
	}
	out := m.out
	if outMax > 0 {
		out = min(out, outMax)
	}
	return max(m.perToken*(tokensIn+out), costMin), true
}

// mean moves an exponentially weighted mean. The first values count evenly, so that it starts at the first.
func mean(old, value float64, n int) float64 {
	w := max(costWeight, 1/float64(n))
	return old + w*(value-old)
}
