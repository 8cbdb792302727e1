package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// gatewayStatus is what a gateway's /status answers.
type gatewayStatus struct {
	Name     string              `json:"name"`
	Degraded bool                `json:"degraded"`
	Pools    []gateway.PoolState `json:"pools"`
}

func gatewayCommand(a *app) *cobra.Command {
	c := noun("gateway", "Online gateways: pools, policies, and the course of a request", gatewayPools(a),
		gatewayExplain(a),
		gatewayPolicies(a), gatewaySet(a), requestBatches(a), requestBatchCancel(a))
	c.PersistentFlags().String("gateway", "http://127.0.0.1:8431", "address of a gateway's debug listener")
	return c
}

func (a *app) poolColumns() []column[gateway.PoolState] {
	count := func(of func(gateway.PoolState) int) func(gateway.PoolState) string {
		return func(p gateway.PoolState) string { return fmt.Sprint(of(p)) }
	}
	waiting := func(criticality string) func(gateway.PoolState) string {
		return count(func(p gateway.PoolState) int { return p.Waiting[criticality] })
	}
	return []column[gateway.PoolState]{
		{title: "MODEL", text: func(p gateway.PoolState) string { return p.Model }},
		{title: "MODE", text: func(p gateway.PoolState) string { return p.Mode }},
		{title: "IN-FLIGHT", right: true, text: count(func(p gateway.PoolState) int { return p.InFlight })},
		{title: "CEILING", right: true, text: count(func(p gateway.PoolState) int { return p.Ceiling })},
		{title: "CRITICAL", right: true, text: waiting("critical")},
		{title: "DEFAULT", right: true, text: waiting("default")},
		{title: "SHEDDABLE", right: true, text: waiting("sheddable")},
		{title: "FLOWS", right: true, text: count(func(p gateway.PoolState) int { return p.Flows })},
		{title: "DROPPED", right: true, text: func(p gateway.PoolState) string {
			var all int64
			for _, n := range p.Dropped {
				all += n
			}
			return number(all)
		}},
		{title: "INSTANCES", wide: true, text: func(p gateway.PoolState) string {
			var list []string
			for _, i := range p.Instances {
				list = append(list, fmt.Sprintf("%s %d/%d (limit %d)", i.Server, i.InFlight, i.Held, i.Limit))
			}
			return strings.Join(list, ", ")
		}},
	}
}

func gatewayPools(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Args: cobra.NoArgs,
		Short: "Pools of one gateway: calls in flight, waiting requests by criticality, mode",
	}
	every := watchFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		return a.watch(c.Context(), *every, func() error {
			var s gatewayStatus
			if err := a.askGateway(c, "/status", &s); err != nil {
				return err
			}
			return printList(a, a.poolColumns(), s.Pools)
		})
	}
	return c
}

func gatewayExplain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "explain REQUEST", Args: cobra.ExactArgs(1),
		Short: "One of the last requests: why it waited, its instance, and its end",
		Long:  "REQUEST is the x-request-id of the answer. A gateway remembers its last 10,000 requests.",
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		var e gateway.RequestRecord
		if err := a.askGateway(c, "/explain/"+segment(args[0]), &e); err != nil {
			return err
		}
		return printOne(a, e, func(w io.Writer) { writeExplanation(w, e) })
	}
	return c
}

// writeExplanation tells what happened to a request, in the order in which it did.
func writeExplanation(w io.Writer, e gateway.RequestRecord) {
	way := fmt.Sprintf("it waited %.1f ms behind %d requests in mode %s", e.QueueMS, e.Trace.Ahead, e.Trace.Mode)
	if e.Trace.Bypassed {
		way = "it passed the queue by"
	}
	fmt.Fprintf(w, "%s  model %s, flow %q, criticality %s, token %q\n", e.ID, e.Model, e.Flow, e.Criticality, e.Token)
	fmt.Fprintf(w, "admission  %s\n", way)
	fmt.Fprintf(w, "fairness   start tag %.1f, virtual time %.1f, estimated cost %.1f ms\n", e.Trace.Start,
		e.Trace.Virtual, e.Trace.Estimate)
	if e.Trace.Dropped != "" {
		fmt.Fprintf(w, "dropped    %s\n", e.Trace.Dropped)
	} else {
		fmt.Fprintf(w, "call       %s, attempt %d, slot kept for %.1f ms\n", e.Server, e.Attempts, e.Trace.CostMS)
	}
	fmt.Fprintf(w, "end        status %d after %.1f ms%s\n", e.Status, e.TookMS, after(": ", e.Error))
}

// gatewayError is an address at which no gateway answers.
type gatewayError struct{ error }

func (e gatewayError) Unwrap() error { return e.error }

// askGateway reads one page of a gateway's debug listener, within --timeout. It needs neither the database nor the API.
func (a *app) askGateway(c *cobra.Command, path string, into any) error {
	address, err := c.Flags().GetString("gateway")
	if err != nil {
		return err
	}
	at, err := url.Parse(address)
	if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Host == "" {
		return usagef("--gateway is %q: want http://host:port", address)
	}
	ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(address, "/")+path, nil)
	if err != nil {
		return usagef("--gateway: %s", err.Error())
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return gatewayError{fmt.Errorf("ask gateway: %w", err)}
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 64<<20))
	if err != nil {
		return gatewayError{fmt.Errorf("ask gateway: %w", err)}
	}
	text, isText := strings.CutSuffix(string(body), "\n")
	isText = isText && strings.HasPrefix(answer.Header.Get("Content-Type"), "text/plain")
	switch {
	case answer.StatusCode == http.StatusNotFound && isText && strings.HasPrefix(path, "/explain/"):
		return fmt.Errorf("%s: %w", text, invalidation.ErrNotFound)
	case answer.StatusCode != http.StatusOK:
		return gatewayError{fmt.Errorf("ask gateway: %s answered %d to %s", address, answer.StatusCode, path)}
	}
	if err := json.Unmarshal(body, into); err != nil {
		return gatewayError{fmt.Errorf("ask gateway: read answer of %s: %w", address, err)}
	}
	return nil
}
