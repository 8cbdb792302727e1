// Package cron fires scheduled jobs.
//
// A Schedule is the text form that a person writes and a row stores. Parse turns it into a Timetable, whose methods are
// pure: they take the time as a parameter and read no clock.
//
//	Next     the next nominal time
//	FireAt   nominal time plus jitter: when the entry is due
//	Explain  the next firings in plain words
//	Words    the schedule in plain words
//
// A nominal time is the instant that a spec names, and the identity of a firing: however often it is computed, by
// whichever leader, it is the same instant, so that a unique key on (job, nominal time) lets it fire once.
//
//	schedule.go, spec.go    a schedule, its defaults, and the fields of its spec
//	next.go                 the next nominal time, across changes of clocks, and its jitter
//	due.go, plan.go         pure: which nominal times to fire now, by the policies for missed and overlapping ones
//	explain.go, words.go    the texts for people
//	settings.go             checks the settings of a job before they are stored
//	engine.go               the duty: the stages of a pass, and when the next one is made
//	fire.go                 the stages that fire jobs and make their next entries
//	rules.go                the stage that moves entries which wait for times of earlier rules of a zone
//
// An Engine fires jobs, which are rows (penstock.cron_job) that functions of the schema make and change. It is a duty
// of the elected leader. Each job has one entry in a queue of kind cron:
//
//	          createNext            fireDue                     any outcome
//	no entry ───────────► initial ──────────► pending, running ─────────────► no entry
//	                      due_at: nominal time plus jitter      endRuns
//
// A firing is a row (job, nominal time), unique, written in the transaction that turns the entry pending and advances
// the job, by the database's clock. A leader that dies during a firing leaves a complete firing or none.
//
//	event                            effect on nominal times
//	no leader fired for a while      CatchUp decides: none, the latest, the latest n one after another
//	it falls due during a run        Overlap decides: skipped, fired when it ends, or it is cancelled for the next
//	the job was paused               CatchUp decides when the pause ends
//	a run is requested               none, but for those that fall due during it: run now does not fire a nominal time
//	clock jumps ahead                as after a time without a leader; by more than jumpMax, once it is believed
//	clock jumps back                 nominal times that fired do not fire again; the next one waits for its time
//	the rules of a zone change       the next term moves the entries that wait for times of other rules (judgeAgain)
//	the spec is set, the same too    nominal times to come come again if a clock that was ahead has fired the job
//	the entry is cancelled           its nominal time is dropped
//	the failure of a run is retried  that entry is the job's again; the one that waited comes after it
//	the spec cannot be parsed        the job is reported (cron_status, doctor: broken); other jobs go on
//
// A nominal time falls due when its jitter has passed. Those that have fallen due when a run begins, and are not
// handled, were missed: the run neither drops them nor is cancelled for them.
//
// # Clock changes
//
// A spec names local (wall-clock) times. At a change of the zone's offset a wall time may
// exist twice or not at all. The hour field distinguishes two kinds of spec.
//
//	                      hour is fixed: "30 2 * * *"      hour starts with *: "30 * * * *"
//	clocks go forward     fires once, at the first          a wall time that does not exist
//	(gap)                 instant after the gap             does not fire
//	clocks go back        fires once, at the first          fires both times: the work
//	(fold)                of the two                        goes on every hour
//
// So a daily job runs once on every day, and an hourly one once in every hour. Schedule.Gap and Schedule.Fold override
// this. "@every" counts elapsed time from Schedule.Start (or from 1970) and ignores the zone.
//
// The search goes from one zone period to the next: between two clock changes the wall clock and the instant differ by
// a constant, so the search for the next wall time within a period runs in plain UTC and needs no case for clock
// changes. A search ends after 12 years, which is longer than the longest pause any spec can make (29 February, eight
// years around 2100).
//
// # Day of month and day of week
//
// As in most crons, a time must match either of the two if both are given ("0 0 13 * fri"
// is every 13th and every Friday) and both if one of them is "*". A step such as */2 counts as given.
package cron
