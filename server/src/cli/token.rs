//! `tollgate token`: makes a caller token, or hashes one for the access file.

use std::process::ExitCode;

use crate::access::Token;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Print the hash of the token that is read from standard input, instead of a new one
    #[arg(long)]
    hash: bool,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    if args.hash {
        let mut text = String::new();
        std::io::stdin().read_line(&mut text).map_err(|error| error.to_string())?;
        let token = text.trim_end_matches(['\r', '\n']);
        if token.is_empty() {
            return Err("standard input contains no token".to_owned());
        }
        super::print(&format!("{}\n", Token::of(token).sha256))?;
    } else {
        let token = Token::new().map_err(str::to_owned)?;
        super::print(&format!("token         {}\ntoken_sha256  {}\n", token.secret, token.sha256))?;
    }
    Ok(ExitCode::SUCCESS)
}
