package peers

// Scenario is one row of the comparison: a measured step, and what must be there before it.
type Scenario struct {
	Name, About string
	Fill        int  // entries pushed before, not measured
	Measured    Step // its GroupSize is also that of Fill
	Held        bool // a REPEATABLE READ transaction is open in the same database from after Fill to the end
}

// shareable reports whether several processes can do a step together.
func (s Step) shareable() bool { return s.Verb == "drain" || s.Verb == "sustained" }

// Sizes bounds the comparison.
type Sizes struct {
	Entries      int     // in pushes and drains
	GroupSize    int     // entries with the same key
	Backlog      int     // further entries waiting in the backlog scenario
	Conns        int     // connections of single pushes
	Pickups      int     // entries of the pick-ups by default; the other pick-ups have a fifth of it, and 100 at least
	Seconds      float64 // length of sustained push and work
	PayloadBytes int     // JSON body of every entry
}

// Scenarios returns all scenarios at the given sizes, in the order in which they run.
func Scenarios(s Sizes) []Scenario {
	step := func(verb string, entries int) Step {
		return Step{Verb: verb, Entries: entries, PayloadBytes: s.PayloadBytes}
	}
	single := step("single", max(1000, s.Entries/5))
	single.Conns = s.Conns
	apart := single
	apart.Settings = Apart
	groups := step("drain", s.Entries)
	groups.GroupSize = s.GroupSize
	sustained := step("sustained", 0)
	sustained.Seconds = s.Seconds
	pickup := func(settings Settings, entries int) Step {
		p := step("pickup", entries)
		p.Settings = settings
		return p
	}
	fewer := max(100, s.Pickups/5)

	return []Scenario{
		{Name: "bulk", About: "bulk push, batches of 1000 from 2 connections", Measured: step("push", s.Entries)},
		{
			Name: "single", About: "single pushes as the library makes them: Penstock's go together where they meet",
			Measured: single,
		},
		{Name: "single-apart", About: "single pushes, a transaction each for all", Measured: apart},
		{Name: "solo", About: "drain of solo entries", Fill: s.Entries, Measured: step("drain", s.Entries)},
		{Name: "groups", About: "drain of ordered groups, interleaved", Fill: s.Entries, Measured: groups},
		{Name: "sustained", About: "push and work at once", Measured: sustained},
		{Name: "pickup", About: "pick-up latency with default settings", Measured: pickup(Defaults, s.Pickups)},
		{Name: "pickup-tuned", About: "pick-up latency tuned", Measured: pickup(Tuned, fewer)},
		{
			Name: "pickup-polling", About: "pick-up latency with default settings, without LISTEN and NOTIFY",
			Measured: pickup(HintsOff, fewer),
		},
		{
			Name: "held", About: "drain of solo entries under a held snapshot", Fill: s.Entries,
			Measured: step("drain", s.Entries), Held: true,
		},
		{
			Name: "backlog", About: "drain in front of a backlog", Fill: s.Entries + s.Backlog,
			Measured: step("drain", s.Entries),
		},
	}
}
