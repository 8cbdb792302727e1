// Command replay runs a request trace through simulated task nodes, with fifo queues and with fair ones, and prints how
// long tenants waited.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/penstock/penstock/bench/replay"
	"github.com/penstock/penstock/pkg/fairness"
)

func main() {
	path := flag.String("trace", "", "lora_request_trace.csv of Alibaba's cluster-trace-v2026-GenAI; without it a "+
		"trace is made up")
	nodes := flag.Int("nodes", 4, "simulated task nodes")
	slots := flag.Int("slots", 8, "slots of each node")
	load := flag.Float64("load", 0.9, "part of all slots that the trace keeps busy: its times are squeezed to that")
	every := flag.Float64("every", 2, "seconds between exchanges of usage")
	models := flag.Bool("models", false, "a queue for each model, instead of one for all")
	seed := flag.Uint64("seed", 1, "of all that is random")
	flag.Parse()
	if err := run(*path, *load, replay.Config{
		Nodes: *nodes, Slots: *slots, Every: *every, Models: *models,
		Seed: *seed,
	}); err != nil {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

func run(path string, load float64, c replay.Config) error {
	trace := replay.Made(20_000, c.Seed)
	if path != "" {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		if trace, err = replay.Read(file); err != nil {
			return err
		}
	}
	replay.Squeeze(trace, c.Nodes*c.Slots, load)
	fmt.Printf("%d requests in %.1f h on %d nodes of %d slots\n\n", len(trace), trace[len(trace)-1].At/3600, c.Nodes,
		c.Slots)
	names := []string{"fifo", "fair"}
	var reports []replay.Report
	for _, c.Algorithm = range []fairness.Algorithm{fairness.Fifo, fairness.Fair} {
		reports = append(reports, replay.Judge(trace, c, replay.Run(trace, c)))
	}
	replay.Write(os.Stdout, names, reports)
	return nil
}
