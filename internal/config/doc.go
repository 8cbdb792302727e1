// Package config reads a program's configuration: defaults, then a file, then the environment, then
// flags; a later source overrides an earlier one. An unknown key is an error in each source.
//
// A program's options are the fields of a struct, with their defaults in it:
//
//	type Config struct {
//		Database config.Database `koanf:"database"`
//		Leader   struct {
//			Listen string `koanf:"listen" help:"address of the HTTP server"`
//		} `koanf:"leader"`
//	}
//
// The key leader.listen is --listen among the flags of the program named leader,
// PENSTOCK_LEADER_LISTEN in the environment, and listen below leader in the file. A section that is
// not named after a program is for all of them. So one file and one environment serve all programs:
// each ignores the sections of the others.
package config
