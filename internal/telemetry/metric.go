package telemetry

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Prefix begins the name of every metric.
const Prefix = "penstock_"

// Metrics makes the metrics of the catalog. With a name or number of labels that is not in the
// catalog the scrape fails, which tests detect.
type Metrics struct {
	byName map[string]Metric
}

// NewMetrics returns the metrics of the catalog.
func NewMetrics() Metrics {
	m := Metrics{map[string]Metric{}}
	for _, one := range Catalog() {
		m.byName[one.Name] = one
	}
	return m
}

// NewRegistry returns the registry of a program: its own collectors, and those of the process and of Go.
func NewRegistry(own ...prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	r.MustRegister(own...)
	return r
}

// Value is one value of a gauge or counter.
func (m Metrics) Value(name string, value float64, labels ...string) prometheus.Metric {
	one, known := m.byName[name]
	desc := prometheus.NewDesc(Prefix+name, one.Help, one.Labels, nil)
	if !known {
		return prometheus.NewInvalidMetric(desc, fmt.Errorf("metric %s is not in the catalog", name))
	}
	kind := prometheus.GaugeValue
	if one.Kind == counter {
		kind = prometheus.CounterValue
	}
	made, err := prometheus.NewConstMetric(desc, kind, value, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(desc, err)
	}
	return made
}

// OneIf is the value of a gauge that is 1 or 0.
func OneIf(set bool) float64 {
	if set {
		return 1
	}
	return 0
}

// Pool returns the metrics of a connection pool.
func (m Metrics) Pool(out chan<- prometheus.Metric, name string, pool *pgxpool.Pool) {
	s := pool.Stat()
	out <- m.Value("db_connections", float64(s.TotalConns()), name)
	out <- m.Value("db_connections_in_use", float64(s.AcquiredConns()), name)
	out <- m.Value("db_waits_total", float64(s.EmptyAcquireCount()), name)
}

// Counter is a counter that its caller adds to.
func (m Metrics) Counter(name string) *prometheus.CounterVec {
	one := m.byName[name]
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: Prefix + name, Help: one.Help}, one.Labels)
}

// Histogram is a histogram of seconds with these buckets.
func (m Metrics) Histogram(name string, buckets ...float64) *prometheus.HistogramVec {
	one := m.byName[name]
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: Prefix + name, Help: one.Help, Buckets: buckets},
		one.Labels)
}

// Collector reads values when it is asked for them. It describes nothing beforehand, as Prometheus allows.
type Collector func(out chan<- prometheus.Metric)

// Describe implements prometheus.Collector.
func (Collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c Collector) Collect(out chan<- prometheus.Metric) { c(out) }

// Other is the label of all values after a Bound is full.
const Other = "other"

// ModelsMax is how many models have series of their own at a leader, about thirty each. What alerts compare for a model
// says nothing of the sums of others.
const ModelsMax = 1000

// Bound limits the values of a label: the first ones keep their name, the rest become Other. A value keeps its label
// for the life of the process, so that no series jumps.
type Bound struct {
	Max int // how many values keep their name: 100

	mu    sync.Mutex
	known map[string]bool
}

// Label is the value itself, or Other.
func (b *Bound) Label(value string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known[value] {
		return value
	}
	if len(b.known) >= cmp.Or(b.Max, 100) {
		return Other
	}
	if b.known == nil {
		b.known = map[string]bool{}
	}
	b.known[value] = true
	return value
}

// Sums adds up gauges and counters whose labels were bounded, so that each series is reported once.
type Sums struct {
	metrics Metrics
	order   []sum
	at      map[string]int
}

type sum struct {
	name   string
	labels []string
	value  float64
}

// Sums returns an empty Sums.
func (m Metrics) Sums() *Sums { return &Sums{metrics: m, at: map[string]int{}} }

// Add adds a value to a series.
func (s *Sums) Add(name string, value float64, labels ...string) {
	s.series(name, labels).value += value
}

// Max keeps the largest value of a series, for ages, which cannot be summed.
func (s *Sums) Max(name string, value float64, labels ...string) {
	one := s.series(name, labels)
	one.value = max(one.value, value)
}

func (s *Sums) series(name string, labels []string) *sum {
	key := fmt.Sprint(name, labels)
	i, known := s.at[key]
	if !known {
		i = len(s.order)
		s.at[key], s.order = i, append(s.order, sum{name: name, labels: labels})
	}
	return &s.order[i]
}

// Collect passes the series on.
func (s *Sums) Collect(out chan<- prometheus.Metric) {
	for _, one := range s.order {
		out <- s.metrics.Value(one.name, one.value, one.labels...)
	}
}
